"""Policy versions along a chain of hosts, as threads and real streams; one folder of shared memory a host."""

import secrets
import threading

import pytest
from relay_hosts import FlippingProxy, RelayHost, RelayPlay, eventually, relay_root

from relax_actor.dcs.manifest import OWNER, bucket_label
from relax_actor.dcs.relay.records import (
    Alive,
    Chunk,
    Follow,
    Gone,
    Offer,
    RelayError,
    Want,
    encode,
    read_down,
    read_up,
)
from relax_actor.dcs.relay.serving import ServingLink
from relax_actor.dcs.shelf import PolicyBudgetError
from transport.shm import SegmentSpaceError
from transport.stream import Stream


@pytest.fixture
def play():
    with relay_root() as root:
        made = RelayPlay(root, secrets.token_hex(4))
        yield made
        made.close()


def test_every_host_of_a_chain_gets_every_bit_of_a_version_once(play):
    a, b, c = play.chain("a", "b", "c")
    manifest = play.publish(0)
    for host in (b, c):
        eventually(lambda host=host: host.has(0))
        assert host.values() == (0, [0, 1, 2, 3, 4, 5])
        assert host.receiver.manifest(0) == manifest
        [relayed] = host.of("policy_relayed")
        assert relayed["bytes"] == manifest.nbytes
    assert [event["upstream"] for event in c.of("policy_relayed")] == ["b"]
    assert len(a.links) == len(b.links) == 1


def test_a_host_that_joins_late_gets_the_newest_version_only(play):
    play.host("a")
    for version in range(3):
        play.publish(version)
    b = play.host("b")
    eventually(lambda: b.has(2))
    assert [event["version"] for event in b.of("policy_relayed")] == [2]


def test_versions_follow_one_another_and_old_ones_are_retired_everywhere(play):
    hosts = play.chain("a", "b", "c")
    for version in range(8):
        play.publish(version)
        for host in hosts:
            eventually(lambda host=host, version=version: host.has(version))
            assert host.values() == (version, [version * 10 + i for i in range(6)])
    for host in hosts:
        eventually(lambda host=host: len(host.space.names(OWNER)) == 2 * 4)


def test_a_store_maps_a_segment_once_for_all_versions_that_are_written_into_it(play):
    a, b = play.chain("a", "b")
    for version in range(12):
        play.publish(version)
        eventually(lambda version=version: b.has(version))
    assert 3 <= len(a.store.mappings) <= 9  # three buckets; two versions are kept, one is written


@pytest.mark.parametrize("elements", [1, 250_000])
def test_buckets_of_any_size_pass(play, elements):
    _, b = play.chain("a", "b")
    play.publisher(bucket_bytes=1024)
    play.publish(0, tensors=40, elements=elements)
    eventually(lambda: b.has(0))
    assert b.values()[1] == list(range(40))


def test_a_version_of_no_tensors_passes(play):
    _, b = play.chain("a", "b")
    play.publisher().publish(0, 0, [])
    eventually(lambda: b.has(0))


def test_a_byte_flipped_on_the_wire_costs_one_more_question(play):
    play.host("a")
    play.publish(0)  # first, so that nothing else is said before it
    b = play.host("b", proxies={"a": FlippingProxy([2000])})
    eventually(lambda: b.has(0))
    [damaged] = b.of("relay_damaged")
    assert (damaged["version"], damaged["bucket"], damaged["upstream"]) == (0, 0, "a")
    assert b.values() == (0, [0, 1, 2, 3, 4, 5])


def flip(space, version, bucket):
    segment = space.attach(space.name(OWNER, version, bucket_label(bucket)), writable=True)
    segment.buf[-1] ^= 1


def test_a_bucket_damaged_where_it_was_published_is_refused_by_name_and_the_next_version_is_not(play):
    a = play.host("a")
    play.publish(0)
    flip(a.space, 0, 1)
    b = play.host("b")
    [refused] = eventually(lambda: b.of("policy_refused"))
    assert refused["version"] == 0
    assert "bucket 1 of policy version 0 is corrupt" in refused["reason"]
    assert len(b.of("relay_damaged")) == 2
    assert b.receiver.latest() is None
    play.publish(1)
    eventually(lambda: b.has(1))
    assert b.values()[0] == 1


def test_a_bucket_damaged_in_the_store_above_is_fetched_from_the_one_before_it(play):
    _, b = play.chain("a", "b")
    play.publish(0)
    eventually(lambda: b.has(0))
    flip(b.space, 0, 2)
    c = play.host("c")
    eventually(lambda: c.has(0))
    assert c.values() == (0, [0, 1, 2, 3, 4, 5])
    assert [event["upstream"] for event in c.of("relay_damaged")] == ["b", "b"]
    assert [event["upstream"] for event in c.of("policy_relayed")] == ["a"]
    assert not c.of("policy_refused")


def test_a_store_that_does_not_answer_is_skipped_and_taken_back_later(play):
    a, b = play.chain("a", "b")
    b.away = True
    c = play.host("c", suspect_s=0.5)
    play.publish(0)
    eventually(lambda: c.has(0))
    assert [event["upstream"] for event in c.of("policy_relayed")] == ["a"]
    b.away = False
    eventually(lambda: c.of("relay_linked")[-1]["upstream"] == "b")
    play.publish(1)
    eventually(lambda: c.has(1))
    assert c.of("policy_relayed")[-1]["upstream"] == "b"
    epochs = [event["epoch"] for event in c.of("relay_linked")]
    assert epochs == sorted(set(epochs))
    assert a.values()[0] == 1


def test_links_that_break_again_and_again_only_cost_time(play):
    a, b, c = play.chain("a", "b", "c")
    for version in range(6):
        play.publish(version, tensors=30, elements=20_000)
        for host in (a, b, a):
            host.cut()
        eventually(lambda version=version: c.has(version))
        assert c.values() == (version, [version * 10 + i for i in range(30)])
    for host in (b, c):
        versions = [event["version"] for event in host.of("policy_relayed")]
        assert versions == sorted(set(versions))


def test_a_restarted_store_adopts_what_was_complete_and_serves_it(play):
    _, b = play.chain("a", "b")
    play.publish(0)
    eventually(lambda: b.has(0))
    b.close()
    play.hosts.remove(b)
    names = b.space.names(OWNER)
    again = play.host("b")
    assert again.receiver.latest() == 0
    assert again.values() == (0, [0, 1, 2, 3, 4, 5])
    assert again.space.names(OWNER) == names
    eventually(lambda: again.of("relay_linked"))
    play.publish(1)
    eventually(lambda: again.has(1))
    assert [event["version"] for event in again.of("policy_relayed")] == [1]


def test_a_budget_below_one_version_is_an_error_that_names_the_bytes(play):
    play.host("a")
    manifest = play.publish(0)
    b = play.host("b", budget_bytes=manifest.nbytes - 1)
    error = eventually(lambda: b.failure)
    assert isinstance(error, PolicyBudgetError)
    assert (error.version, error.need_bytes, error.held_bytes) == (0, manifest.nbytes, 0)
    assert str(manifest.nbytes) in str(error)
    assert b.space.names(OWNER) == []


def test_a_budget_for_two_versions_makes_a_store_keep_fewer_than_it_was_told(play):
    play.host("a")
    manifest = play.publish(0)
    b = play.host("b", keep=5, budget_bytes=2 * manifest.nbytes)
    for version in range(1, 6):
        eventually(lambda version=version: b.has(version - 1))
        play.publish(version)
    eventually(lambda: b.has(5))
    assert b.failure is None
    held = sum(
        (b.space.root / name).stat().st_size for name in b.space.names(OWNER) if "manifest" not in name
    )
    assert held <= 2 * manifest.nbytes


def test_a_store_that_ends_in_the_middle_of_a_version_leaves_nothing_of_it(play):
    a, b = play.chain("a", "b")
    play.publish(0)
    eventually(lambda: b.has(0))
    names = b.space.names()
    a.store.paused = True
    play.publish(1)
    eventually(lambda: b.store.incoming)
    b.close()
    play.hosts.remove(b)
    assert b.space.names() == names


def resume(host):
    host.store.paused = False
    host.store.ring()


def test_buckets_go_on_down_the_chain_while_others_are_still_on_their_way(play):
    a, b, c = play.chain("a", "b", "c")
    a.store.paused = True
    play.publish(0)
    eventually(lambda: c.store.incoming and c.store.incoming.has(0))
    assert b.receiver.latest() is None
    resume(a)
    eventually(lambda: c.has(0))
    assert c.values() == (0, [0, 1, 2, 3, 4, 5])


def test_a_version_of_which_little_is_here_gives_way_to_a_newer_one_but_not_twice_in_a_row(play):
    a, b = play.chain("a", "b")
    a.store.paused = True
    for version in range(3):
        play.publish(version, tensors=12)
        eventually(lambda version=version: b.store.incoming and b.store.incoming.version == min(version, 1))
        eventually(lambda: b.store.incoming.has(0))
    eventually(lambda: a.links[-1]._offered == (2, True))
    resume(a)
    eventually(lambda: b.has(2))
    assert [(event["version"], event["reason"]) for event in b.of("relay_skipped")] == [
        (0, "overtaken by version 1")
    ]
    assert [event["version"] for event in b.of("policy_relayed")] == [1, 2]


def test_a_version_that_was_retired_above_before_it_could_be_leased_is_given_up(play):
    """The store above has it only on its way, and gives it up."""
    a, b, c = play.chain("a", "b", "c")
    a.store.paused = True
    play.publish(0, tensors=12)
    eventually(lambda: c.store.incoming and c.store.incoming.has(0))
    play.publish(1, tensors=12)
    eventually(lambda: b.of("relay_skipped"))
    [skipped] = eventually(lambda: c.of("relay_skipped"))
    assert (skipped["version"], skipped["reason"]) == (0, "gone upstream")
    resume(a)
    eventually(lambda: c.has(1))
    assert c.values()[0] == 1


def test_the_memory_of_a_version_that_was_given_up_is_used_for_the_next(play):
    a, b = play.chain("a", "b")
    a.store.paused = True
    play.publish(0, tensors=12)
    eventually(lambda: b.store.incoming and b.store.incoming.has(0))
    inode = (b.space.root / b.space.name(OWNER, 0, bucket_label(0))).stat().st_ino
    play.publish(1, tensors=12)
    eventually(lambda: b.store.incoming and b.store.incoming.version == 1 and b.store.incoming.has(0))
    resume(a)
    eventually(lambda: b.has(1))
    inodes = {(b.space.root / name).stat().st_ino for name in b.space.names(OWNER, 1)}
    assert inode in inodes


class Above:
    """Stands for a store above that says what the test wants; the host below is real."""

    def __init__(self, host):
        self.host, self.streams, self.epoch = host, [], 0

    def __call__(self, stream):
        self.streams.append(stream)
        self.epoch = read_up(stream.receive()[0], "below").epoch

    def say(self, record, *payload):
        self.streams[-1].send(encode(record), *payload)


@pytest.fixture
def above(play, monkeypatch):
    """A host `a` whose links are in the test's hands, and a host `b` below it."""
    play.host("a")
    made, done = Above(None), threading.Event()

    def serve(host, link, stream):
        made(stream)
        done.wait(20)

    monkeypatch.setattr(RelayHost, "serve", serve)
    made.host = play.host("b")
    eventually(lambda: len(made.streams) == 1 and made.epoch == 1)
    yield made
    done.set()


def offered(play, above):
    """Offer version 0 to the host below; return its manifest."""
    manifest = play.publish(0)
    above.say(Offer(epoch=1, version=0, is_complete=True, manifest=manifest.to_bytes()))
    eventually(lambda: above.host.store.incoming)
    return manifest


def chunk(**fields):
    return Chunk(**{"epoch": 1, "version": 0, "bucket": 0, "offset": 0, **fields})


@pytest.mark.parametrize(
    ("record", "nbytes", "reason"),
    [
        (chunk(epoch=7), 10, "said something of epoch 7 in epoch 1"),
        (chunk(bucket=1), 10, "sent 10 bytes of bucket 1 from 0, out of turn"),
        (chunk(offset=64), 10, "sent 10 bytes of bucket 0 from 64, out of turn"),
        (chunk(), 100_000, "sent 100000 bytes of bucket 0 from 0, out of turn"),
        (Alive(epoch=1), 10, "sent 10 bytes that belong to nothing"),
        (Follow(epoch=1, have=None), 0, "carried what nobody says"),
    ],
)
def test_what_is_not_of_this_link_ends_it_and_touches_nothing(play, above, record, nbytes, reason):
    offered(play, above)
    above.say(record, memoryview(bytes(nbytes)))
    [lost] = eventually(lambda: above.host.of("relay_link_lost"))
    assert reason in lost["reason"]
    assert above.host.receiver.latest() is None
    eventually(lambda: len(above.streams) == 2)


def test_chunks_of_a_version_that_was_given_up_are_thrown_away(play, above):
    offered(play, above)
    above.say(Gone(epoch=1, version=0))
    above.say(chunk(), memoryview(bytes(3_000_000)))
    above.say(Alive(epoch=1))
    [skipped] = eventually(lambda: above.host.of("relay_skipped"))
    assert skipped["reason"] == "gone upstream"
    manifest = play.publish(1)
    above.say(Offer(epoch=1, version=1, is_complete=True, manifest=manifest.to_bytes()))
    eventually(lambda: above.host.store.incoming and above.host.store.incoming.version == 1)
    assert not above.host.of("relay_link_lost")


def test_a_damaged_manifest_is_refused_by_name(play, above):
    damaged = bytearray(play.publish(0).to_bytes())
    damaged[-1] ^= 1
    above.say(Offer(epoch=1, version=0, is_complete=True, manifest=bytes(damaged)))
    [refused] = eventually(lambda: above.host.of("policy_refused"))
    assert refused["version"] == 0
    assert "the manifest of policy version 0 is corrupt" in refused["reason"]


def test_a_version_there_is_no_room_for_is_refused_and_the_next_one_is_not(play, above, monkeypatch):
    manifest = offered(play, above)
    create = type(above.host.space).create

    def full(space, *args):
        raise SegmentSpaceError("x", space.root, args[-1], 0)

    monkeypatch.setattr(type(above.host.space), "create", full)
    above.say(chunk(), memoryview(bytes(manifest.buckets[0].nbytes)))
    [refused] = eventually(lambda: above.host.of("policy_refused"))
    assert f"needs {manifest.buckets[0].nbytes} bytes" in refused["reason"]
    monkeypatch.setattr(type(above.host.space), "create", create)
    manifest = play.publish(1)
    eventually(lambda: above.epoch == 2)
    above.say(Offer(epoch=2, version=1, is_complete=True, manifest=manifest.to_bytes()))
    eventually(lambda: above.host.store.incoming and above.host.store.incoming.version == 1)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([Want(epoch=3, version=0, bucket=0)], "the link with x"),
        ([Follow(epoch=4, have=None)], "the link with x"),
        ([Follow(epoch=3, have=None), Want(epoch=2, version=0, bucket=0)], "said Want"),
    ],
    ids=["at the start", "another epoch", "in the middle"],
)
def test_a_store_below_that_says_what_is_not_of_its_link_is_let_go(play, records, why):
    a = play.host("a")
    link = ServingLink(a.store, "x", 3, alive_s=0.1)
    ended = []

    def serve(stream):
        with pytest.raises(RelayError, match=why):
            link.run(stream)
        ended.append(True)

    with Stream.connect(a.listener.address, a.listener.ticket(serve), 20.0) as stream:
        for record in records:
            stream.send(encode(record))
        eventually(lambda: ended)
    assert not link.is_open


def test_a_want_of_another_version_voids_those_before_and_a_missing_one_is_told(play):
    a = play.host("a")
    a.store.paused = True
    play.publish(0)
    link = ServingLink(a.store, "x", 3, alive_s=60)
    with Stream.connect(a.listener.address, a.listener.ticket(lambda s: a.serve(link, s)), 20.0) as stream:
        stream.send(encode(Follow(epoch=3, have=None)))
        assert read_down(stream.receive()[0], "a").version == 0
        stream.send(encode(Want(epoch=3, version=0, bucket=1)))
        stream.send(encode(Want(epoch=3, version=9, bucket=0)))
        assert read_down(stream.receive()[0], "a") == Gone(epoch=3, version=9)
        assert link.is_open
        assert read_down(stream.receive()[0], "a").version == 0  # offered again, as if nothing was
        link.close()


def test_a_version_whose_bucket_was_cut_above_is_told_to_be_gone_once_and_the_next_one_comes(play):
    a = play.host("a")
    play.publish(0)
    with (a.space.root / a.space.name(OWNER, 0, bucket_label(1))).open("r+b") as file:
        file.truncate(100)
    b = play.host("b")
    [skipped] = eventually(lambda: b.of("relay_skipped"))
    assert (skipped["version"], skipped["reason"]) == (0, "gone upstream")
    play.publish(1)
    eventually(lambda: b.has(1))
    assert len(b.of("relay_skipped")) == len(b.of("relay_linked")) == 1
