"""Policy versions by broadcasts to a group of hosts, as threads and real gloo groups."""

import secrets

import pytest
from relay_hosts import GROUP_S, RelayPlay, eventually, relay_root

from relax_actor.dcs.manifest import OWNER, bucket_label
from relax_actor.dcs.relay.carrier import GlooCarrier, GroupBrokenError
from relax_actor.dcs.relay.group import Seat
from relax_actor.dcs.shelf import PolicyBudgetError
from relax_actor.ids import Holder
from transport.shm import SegmentSpaceError

NAMES = ("b", "c")


class GroupPlay(RelayPlay):
    """Hosts `a`, which leads, and others of `NAMES`."""

    def group(self, *names, **settings):
        return [self.host(name, group=NAMES, **settings) for name in ("a", *names)]

    def await_group(self, *names):
        """Wait until these are seated together; return the epoch."""
        members = [host for host in self.hosts if host.name in names]

        def epoch():
            [formed] = self.hosts[0].of("relay_group_formed")[-1:] or [{"members": None}]
            is_here = formed["members"] == list(names)
            return (
                is_here
                and {formed["epoch"]} == {host.puller.rider.epoch for host in members}
                and formed["epoch"]
            )

        return eventually(epoch)


@pytest.fixture
def play():
    with relay_root() as root:
        made = GroupPlay(root, secrets.token_hex(4))
        yield made
        made.close()


def relays(host):
    return [(event["version"], event["relay"]) for event in host.of("policy_relayed")]


def test_every_host_of_a_group_gets_every_bit_of_every_version_by_one_broadcast(play):
    _, b, c = play.group("b", "c")
    play.await_group("b", "c")
    for version in range(4):
        manifest = play.publish(version, tensors=20, elements=3000)
        for host in (b, c):
            eventually(lambda host=host, version=version: host.has(version))
            assert host.values() == (version, [version * 10 + i for i in range(20)])
            assert host.receiver.manifest(version) == manifest
    assert relays(b) == relays(c) == [(version, "group") for version in range(4)]
    for host in (b, c):
        eventually(lambda host=host: len(host.space.names(OWNER)) == 2 * (len(manifest.buckets) + 1))


@pytest.mark.parametrize(("bucket_bytes", "elements"), [(1024, 1), (64 << 20, 5_000_000)])
def test_buckets_of_any_size_are_broadcast(play, bucket_bytes, elements):
    _, b = play.group("b")
    play.publisher(bucket_bytes=bucket_bytes)
    play.await_group("b")
    play.publish(0, tensors=3, elements=elements)
    eventually(lambda: b.has(0))
    assert b.values() == (0, [0, 1, 2])
    assert relays(b) == [(0, "group")]


def test_a_version_of_no_tensors_is_broadcast(play):
    _, b = play.group("b")
    play.await_group("b")
    play.publisher().publish(0, 0, [])
    eventually(lambda: b.has(0))


def test_who_joins_late_gets_what_there_is_along_the_chain_and_then_a_seat_in_the_next_group(play):
    _, b = play.group("b")
    first = play.await_group("b")
    play.publish(0)
    eventually(lambda: b.has(0))
    c = play.host("c", group=NAMES)
    eventually(lambda: c.has(0))
    assert relays(c) == [(0, "chain")]
    assert play.await_group("b", "c") > first
    play.publish(1)
    for host in (b, c):
        eventually(lambda host=host: host.has(1))
        assert relays(host)[-1] == (1, "group")


def test_who_leaves_breaks_the_group_and_the_next_one_is_formed_without_it(play):
    a, b, c = play.group("b", "c")
    first = play.await_group("b", "c")
    c.close()
    play.hosts.remove(c)
    assert play.await_group("b") > first
    [lost] = a.of("relay_group_lost")
    assert lost["epoch"] == first
    play.publish(0)
    eventually(lambda: b.has(0))
    assert relays(b) == [(0, "group")]


def test_a_new_incarnation_of_a_store_gets_a_seat_in_the_next_group(play):
    _, b, c = play.group("b", "c")
    play.await_group("b", "c")
    play.publish(0)
    eventually(lambda: b.has(0) and c.has(0))
    c.close()
    play.hosts.remove(c)
    c = play.host("c", group=NAMES, incarnation=2)
    play.await_group("b", "c")
    play.publish(1)
    eventually(lambda: b.has(1) and c.has(1))
    assert relays(c) == [(1, "group")]


def flip(space, version, bucket):
    segment = space.attach(space.name(OWNER, version, bucket_label(bucket)), writable=True)
    segment.buf[-1] ^= 1


class Damaging(GlooCarrier):
    """A carrier that alters one byte of what the n-th piece of weights brings."""

    damages = 0
    spoke = 0

    def begin(self, data):
        super().begin(data)
        self.last = data

    def wait(self):
        super().wait()
        if Damaging.damages and self.last.nbytes > 5000:
            Damaging.damages -= 1
            self.last[0] ^= 1


def test_a_bucket_damaged_on_its_way_comes_once_more_along_the_chain(play, monkeypatch):
    a = play.host("a", group=NAMES)
    monkeypatch.setattr("relax_actor.dcs.relay.riding.IN_FLIGHT", 1)
    b = play.host("b", group=NAMES, join=lambda seat: Damaging(seat, "127.0.0.1", deadline_s=GROUP_S))
    c = play.host("c", group=NAMES)
    play.await_group("b", "c")
    Damaging.damages = 1
    play.publish(0)
    for host in (b, c):
        eventually(lambda host=host: host.has(0))
        assert host.values() == (0, [0, 1, 2, 3, 4, 5])
    [damaged] = b.of("relay_damaged")
    assert (damaged["version"], damaged["bucket"], damaged["upstream"]) == (0, 0, "a")
    assert relays(b) == [(0, "chain")]
    assert relays(c) == [(0, "group")]
    assert "not all of policy version 0 came as it was published" in b.of("relay_group_lost")[0]["reason"]
    play.await_group("b", "c")
    play.publish(1)
    eventually(lambda: b.has(1) and c.has(1))
    assert len(a.links) >= 2


def test_a_bucket_damaged_where_it_was_published_is_refused_by_name_and_the_next_version_is_not(play):
    a, b, c = play.group("b", "c")
    play.await_group("b", "c")
    a.store.looks = False
    play.publish(0)
    flip(a.space, 0, 1)
    a.store.looks = True
    for host in (b, c):
        [refused] = eventually(lambda host=host: host.of("policy_refused"))
        assert refused["version"] == 0
        assert "bucket 1 of policy version 0 is corrupt" in refused["reason"]
        assert host.receiver.latest() is None
    play.await_group("b", "c")
    play.publish(1)
    for host in (b, c):
        eventually(lambda host=host: host.has(1))
        assert relays(host) == [(1, "group")]


def test_a_version_there_is_no_room_for_in_one_store_reaches_the_others(play, monkeypatch):
    _, b, c = play.group("b", "c")
    play.await_group("b", "c")
    create = type(b.space).create

    def full(space, *args):
        if space is b.space:
            raise SegmentSpaceError("x", space.root, args[-1], 0)
        return create(space, *args)

    monkeypatch.setattr(type(b.space), "create", full)
    play.publish(0)
    eventually(lambda: c.has(0))
    [refused] = eventually(lambda: b.of("policy_refused"))
    assert refused["version"] == 0
    monkeypatch.setattr(type(b.space), "create", create)
    play.publish(1)
    eventually(lambda: b.has(1) and c.has(1))
    assert relays(b) == [(1, "group")]
    assert relays(c) == [(0, "group"), (1, "group")]


def test_a_version_beyond_the_budget_ends_the_store_and_not_the_others(play):
    play.host("a", group=NAMES)
    b = play.host("b", group=NAMES, budget_bytes=1000)
    c = play.host("c", group=NAMES)
    play.await_group("b", "c")
    play.publish(0)
    assert isinstance(eventually(lambda: b.failure), PolicyBudgetError)
    eventually(lambda: c.has(0))
    assert c.values() == (0, [0, 1, 2, 3, 4, 5])


def test_a_damaged_manifest_where_it_was_published_costs_that_version_only(play):
    a, b = play.group("b")
    play.await_group("b")
    a.store.looks = False
    play.publish(0)
    with a.space.attach(a.space.name(OWNER, 0, "manifest"), writable=True) as segment:
        segment.buf[-1] ^= 1
    a.store.looks = True
    play.publish(1)
    eventually(lambda: b.has(1))
    assert relays(b) == [(1, "group")]


def test_a_bucket_cut_where_it_was_published_costs_that_version_only(play):
    a, b = play.group("b")
    play.await_group("b")
    a.store.looks = False
    play.publish(0)
    with (a.space.root / a.space.name(OWNER, 0, bucket_label(1))).open("r+b") as file:
        file.truncate(100)
    a.store.looks = True
    play.publish(1)
    eventually(lambda: b.has(1))
    assert relays(b) == [(1, "group")]


def test_a_group_that_not_all_come_to_is_given_up_after_the_deadline(play):
    def stays_away(seat):
        raise GroupBrokenError(seat.epoch, "it stays away")

    a = play.host("a", group=NAMES, group_s=0.7)
    b = play.host("b", group=NAMES, group_s=0.7)
    c = play.host("c", group=NAMES, join=stays_away)
    eventually(lambda: a.of("relay_group_lost"))
    play.publish(0)
    eventually(lambda: b.has(0) and c.has(0))
    assert relays(c) == [(0, "chain")]
    epochs = [event["epoch"] for event in a.of("relay_group_lost")]
    assert epochs == sorted(set(epochs))


def test_a_seat_of_an_older_group_is_not_taken(play):
    a, b = play.group("b")
    epoch = play.await_group("b")
    rider = b.puller.rider
    old = Seat(lead=Holder("a", 1), epoch=epoch, rank=1, size=2, rendezvous="tcp://127.0.0.1:9", key=b"")
    asked = []
    rider._ask = lambda have: asked.append(have) or old
    a.leader.close()
    eventually(lambda: len(asked) > 2)
    assert rider.epoch == 0
    assert not b.of("relay_group_lost")


def test_nobody_is_in_a_group_whose_key_it_does_not_have(play):
    a = play.host("a", group=NAMES)
    b = play.host("b", group=NAMES)
    seats = b.puller.rider
    ask = seats._ask
    seats._ask = lambda have: (
        (found := ask(have))
        and Seat(**{name: getattr(found, name) for name in found.__struct_fields__} | {"key": b"other"})
    )
    eventually(lambda: a.of("relay_group_formed"))
    play.publish(0)
    [lost, *_] = eventually(lambda: b.of("relay_group_lost"))
    assert "does not have the group's key" in lost["reason"]
    eventually(lambda: b.has(0))
    assert relays(b) == [(0, "chain")]
