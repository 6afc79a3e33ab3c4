"""Rows that travel between hosts arrive as they were, once, whatever is lost or repeated on the way.

The streams are real ones, on loopback; both ends are in this process.
"""

import itertools
import threading
from contextlib import closing, suppress

import numpy as np
import pytest
from watching import eventually

from relax_actor.errors import ActorDied, Executed, RemoteError
from relax_actor.ids import Holder
from relax_actor.protocol import FinishReason, SampleReady, TensorRef
from relax_actor.roles import kept_rows, remote_rows
from relax_actor.roles.dock import Admission, RowDock
from relax_actor.roles.remote_rows import RemoteRows
from relax_actor.roles.rows import LocalRows
from relax_actor.transfer_queue import carrying, docking, link_jobs
from relax_actor.transfer_queue.dock import Dock
from relax_actor.transfer_queue.docking import DockLink, SharedReader, Traffic
from relax_actor.transfer_queue.parcels import (
    Docked,
    Given,
    ParcelTooLargeError,
    Part,
    RowLinkError,
    Want,
    encode,
    read_down,
    read_up,
    requests_for,
    spans,
)
from relax_actor.transfer_queue.storage import RowReader, RowWriter
from relax_actor.transfer_queue.summing import summed
from transport.pool import Piece
from transport.segment import parse_name
from transport.shm import SegmentMissingError, SegmentSpaceError, ShmSpace
from transport.stream import Stream, StreamError, StreamListener

RUN = "ab12cd34"
PRODUCER = Holder("rollout/0", 2)
WAIT_S = 60.0


@pytest.fixture
def space(tmp_path):
    return ShmSpace(RUN, tmp_path)


@pytest.fixture
def dock(space):
    return Dock(space, Holder("dock", 1))


def data_of(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def send(dock, number, data, *, again=False, holder=PRODUCER):
    """Do what a link does with a parcel."""
    found = dock.room(holder, number, data.nbytes, is_repeated=again)
    if isinstance(found, Piece):
        found.segment.buf[found.offset : found.offset + data.nbytes] = data.data
        return dock.name(holder, number, found)
    return found


def bytes_at(space, berth, nbytes):
    ref = TensorRef(segment=berth.segment, offset=berth.offset, dtype="uint8", shape=(nbytes,))
    return RowReader(space).read(ref).tobytes()


# -- the dock ----------------------------------------------------------------------------------------


def test_a_whole_parcel_is_its_producers_and_lies_there_as_it_was(space, dock):
    data = data_of(1050)
    berth = send(dock, 7, data)
    assert bytes_at(space, berth, 1050) == data.tobytes()
    name = parse_name(berth.segment)
    assert (name.owner, name.incarnation) == ("rollout/0", 2)


def test_nothing_has_a_name_of_the_producers_before_it_is_whole(space, dock):
    piece = dock.room(PRODUCER, 1, 250, is_repeated=False)
    assert space.names("rollout/0") == []
    assert dock.arriving == 1
    assert dock.name(PRODUCER, 1, piece) is not None
    assert dock.arriving == 0


def test_room_that_is_given_up_is_free(space, dock):
    piece = dock.room(PRODUCER, 1, 250, is_repeated=False)
    dock.give_up(piece)
    assert dock.arriving == 0
    assert not space.exists(piece.name)


def test_a_parcel_sent_again_is_stored_once(space, dock):
    data = data_of(250)
    berth = send(dock, 1, data)
    assert send(dock, 1, data, again=True) == berth
    assert len(space.names("rollout/0")) == 1


def test_a_parcel_that_comes_by_two_links_at_once_is_stored_once(space, dock):
    first = dock.room(PRODUCER, 1, 250, is_repeated=False)
    second = dock.room(PRODUCER, 1, 250, is_repeated=True)
    berth = dock.name(PRODUCER, 1, second)
    assert dock.name(PRODUCER, 1, first) == berth
    assert len(space.names("rollout/0")) == 1
    assert dock.arriving == 0


def test_a_parcel_that_an_earlier_dock_stored_is_found(space, dock):
    """The dock died before it could answer."""
    send(dock, 1, data_of(90, seed=1))
    data = data_of(250, seed=2)
    berth = send(dock, 2, data)
    space.sweep("dock", 1)  # as its node agent does
    successor = Dock(space, Holder("dock", 2))
    assert send(successor, 2, data, again=True) == berth
    assert bytes_at(space, berth, 250) == data.tobytes()
    assert successor.arriving == 0


def test_what_is_sent_again_to_a_dock_that_has_nothing_is_stored(space, dock):
    data = data_of(250)
    assert bytes_at(space, send(dock, 1, data, again=True), 250) == data.tobytes()


def test_what_a_producer_that_is_gone_did_not_put_is_freed(space, dock):
    send(dock, 1, data_of(50))
    piece = dock.room(PRODUCER, 2, 150, is_repeated=False)
    adopted = space.adopt(send(dock, 3, data_of(50)).segment, "rows", 1)
    dock.forget("rollout/0", 2)
    assert space.names("rollout/0") == []
    assert space.exists(adopted)
    assert dock.is_gone(PRODUCER)
    assert send(dock, 1, data_of(50), holder=Holder("rollout/0", 3)) is not None
    assert space.exists(piece.name)  # its link still writes there: nothing else may
    assert dock.name(PRODUCER, 2, piece) is None
    assert not space.exists(piece.name)


def test_what_an_earlier_incarnation_left_is_freed_when_the_next_one_sends(space, dock):
    send(dock, 1, data_of(50))
    successor = Dock(space, Holder("dock", 2))
    send(successor, 1, data_of(50), holder=Holder("rollout/0", 3))
    assert [parse_name(name).incarnation for name in space.names("rollout/0")] == [3]


def test_of_many_parcels_the_oldest_are_forgotten(space, dock, monkeypatch):
    monkeypatch.setattr("relax_actor.transfer_queue.dock.REMEMBERED", 2)
    first, *_ = [send(dock, number, data_of(20, number)) for number in range(4)]
    assert len(dock._docked) == 2
    assert send(dock, 0, data_of(20, 0), again=True) == first  # its name still says where it is


# -- how arrays are cut ------------------------------------------------------------------------------


def ref_of(nbytes, name="s"):
    return TensorRef(segment=name, offset=0, dtype="uint8", shape=(nbytes,))


def test_no_request_is_for_more_than_a_part_and_all_bytes_are_asked_for_once():
    refs = [ref_of(n, str(n)) for n in (30, 250, 0, 70, 100, 1)]
    requests = requests_for(refs, part_bytes=100)
    assert all(sum(piece.stop - piece.start for piece in request) <= 100 for request in requests)
    asked = [piece for request in requests for piece in request]
    for ref in refs:
        cuts = [(piece.start, piece.stop) for piece in asked if piece.ref == ref]
        assert cuts[0][0] == 0
        assert cuts[-1][1] == ref.shape[0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))


def test_arrays_beyond_4_gib_are_cut_without_their_bytes():
    """Nothing of that size is written or read here."""
    nbytes = 5 * 2**30 + 3
    cuts = [*spans(nbytes)]
    assert sum(stop - start for start, stop in cuts) == nbytes == cuts[-1].stop
    assert [*spans(0)] == []
    pieces = [piece for request in requests_for([ref_of(nbytes)]) for piece in request]
    assert pieces[-1].stop == nbytes
    assert sum(piece.stop - piece.start for piece in pieces) == nbytes


def test_what_nobody_says_is_refused_by_name():
    for read in (read_up, read_down):
        with pytest.raises(RowLinkError, match="the row link with you carried what nobody says"):
            read(b"\xc1", "you")


# -- an actor's way to the rows ----------------------------------------------------------------------


class Answer:
    """A reply that is there."""

    def __init__(self, value=None, error=None):
        self._value, self._error = value, error

    def result(self):
        if self._error is not None:
            raise self._error
        return self._value


class Docks:
    """The docks of a host, one after the other, in this process: `ask` is what a ref to them does.

    Args:
        space: that host's memory.
    """

    def __init__(self, space):
        self._space, self._incarnations = space, itertools.count(1)
        self.errors, self.links, self.ended, self.full = [], [], [], []
        self.listener = StreamListener("127.0.0.1", WAIT_S)
        self.traffic = Traffic()
        self.replace()

    def replace(self):
        """Let the dock be another incarnation."""
        self.dock = Dock(self._space, Holder("dock", next(self._incarnations)))

    def ask(self, method, peer, _way):
        assert method is RowDock.admit
        if self.errors:
            return Answer(error=self.errors.pop(0))
        link = DockLink(self.dock, SharedReader(RowReader(self._space)), self.traffic, peer, self.full.append)
        self.links.append(link)
        ticket = self.listener.ticket(lambda stream: self._serve(link, stream))
        return Answer(Admission(address=str(self.listener.address), ticket=ticket))

    def _serve(self, link, stream):
        with suppress(StreamError):
            try:
                link.run(stream)
            except RowLinkError as error:
                self.ended.append(error)

    def close(self):
        self.listener.close()
        for link in self.links:
            link.close()


DIED = ActorDied("dock", 1, "SIGKILL", Executed.MAYBE)


@pytest.fixture
def docks(space):
    with closing(Docks(space)) as docks:
        yield docks


@pytest.fixture
def remote(docks):
    with closing(RemoteRows(docks, PRODUCER, RUN)) as remote:
        yield remote


def sample(row, lease_id=1):
    return SampleReady(
        group_id=3,
        sample_index=0,
        lease_id=lease_id,
        tokens=row["tokens"],
        logprobs=row["logprobs"],
        versions=row["versions"],
        oldest_version=0,
        newest_version=0,
        finish_reason=FinishReason.STOP,
    )


def written(rows, n=5):
    arrays = {
        "tokens": np.arange(n, dtype=np.int32),
        "logprobs": np.full(n, -0.5, np.float32),
        "versions": np.full(n, 3, np.int32),
    }
    return [sample(row) for row in rows.write([arrays, {name: each * 2 for name, each in arrays.items()}])]


def ended(handed):
    """Wait for the answer; return why it has to be repeated."""
    eventually(handed.done)
    return handed.failure()


def fetched(remote, refs):
    arrival = remote.fetch(refs)
    eventually(arrival.done)


def test_rows_handed_over_are_read_in_place_on_the_queues_host(space, remote):
    handed = remote.hand_over(written(remote))
    assert ended(handed) == ""
    first, second = handed.records()
    reader = RowReader(space)
    assert reader.read(first.tokens).tolist() == [0, 1, 2, 3, 4]
    assert reader.read(second.logprobs).tolist() == [-1.0] * 5
    assert first.tokens.segment == second.versions.segment
    assert not remote.is_crowded


def test_no_rows_are_no_parcel(remote):
    assert remote.write([]) == []


def test_large_rows_travel_in_parts_by_one_link(space, remote, docks, monkeypatch):
    monkeypatch.setattr(link_jobs, "spans", lambda nbytes: spans(nbytes, 1000))
    arrays = [data_of(n, n) for n in (5000, 3, 12345)]
    handed = [remote.hand_over(list(remote.write([{"a": array}])[0].values())) for array in arrays]
    for each, array in zip(handed, arrays, strict=True):
        assert ended(each) == ""
        assert np.array_equal(RowReader(space).read(each.records()[0]), array)
    assert docks.traffic.parts == 5 + 1 + 13
    assert docks.traffic.taken_bytes == sum(array.nbytes for array in arrays)
    assert len(docks.links) == 1
    assert docks.links[0].is_open


def test_the_memory_of_a_parcel_is_used_again_once_it_is_there(remote):
    _, first = remote.room(100_000)
    held = np.frombuffer(first, np.uint8)
    (ref,) = (TensorRef(name, 0, "uint8", (100_000,)) for name in remote._parcels)
    _, other = remote.room(100_000)
    assert not np.shares_memory(held, np.frombuffer(other, np.uint8))
    handed = remote.hand_over([ref])
    assert ended(handed) == ""
    handed.records()
    _, again = remote.room(90_000)
    assert np.shares_memory(held, np.frombuffer(again, np.uint8))


def test_of_the_memory_of_parcels_no_more_is_kept_than_may_be(monkeypatch):
    memory = kept_rows.RowMemory(most_bytes=300_000)
    pieces = [memory.take(131_072) for _ in range(3)]
    for piece in pieces:
        memory.give_back(piece)
    assert sum(each.nbytes for each in memory._kept) == 262_144
    assert memory.take(1000).nbytes == 1000  # of its own: it would keep far more than it needs
    assert len(memory._kept) == 2


def test_two_ways_of_one_actor_never_take_each_others_parcels(space, docks):
    """Such as two producers, each of which begins to count."""
    with closing(RemoteRows(docks, PRODUCER, RUN)) as one, closing(RemoteRows(docks, PRODUCER, RUN)) as two:
        handed = [
            (rows.hand_over([rows.write([{"a": np.full(9, n, np.uint8)}])[0]["a"]]), n)
            for n, rows in enumerate((one, two))
        ]
        for each, n in handed:
            assert ended(each) == ""
            assert RowReader(space).read(each.records()[0]).tolist() == [n] * 9
        assert all(link.is_open for link in docks.links)


def test_while_the_dock_is_away_nothing_is_lost_and_it_is_said_why(space, remote, docks):
    docks.errors = [DIED]
    handed = remote.hand_over(written(remote))
    assert "SIGKILL" in ended(handed)
    again = remote.hand_over(handed.sent, again=True)
    assert ended(again) == ""
    assert RowReader(space).read(again.records()[0].tokens).tolist() == [0, 1, 2, 3, 4]


def test_what_a_link_that_broke_did_not_bring_is_handed_over_again(space, remote, docks, monkeypatch):
    """In the middle of a parcel; the next dock knows nothing of it."""
    monkeypatch.setattr(link_jobs, "spans", lambda nbytes: spans(nbytes, 1000))
    taken = threading.Event()

    def point(name):
        if name == "part_taken" and not taken.is_set() and docks.traffic.parts == 3:
            taken.set()
            docks.links[0].close()

    monkeypatch.setattr(docking, "point", point)
    data = data_of(10_000)
    handed = remote.hand_over([remote.write([{"a": data}])[0]["a"]])
    assert "the stream with" in ended(handed)
    eventually(lambda: docks.dock.arriving == 0)
    docks.replace()
    again = remote.hand_over(handed.sent, again=True)
    assert ended(again) == ""
    assert np.array_equal(RowReader(space).read(again.records()[0]), data)
    assert len(docks.links) == 2


def test_a_parcel_whose_answer_was_lost_is_not_stored_twice(space, remote, docks, monkeypatch):
    records = written(remote)
    landed = docks.dock.name

    def name(*args):
        docks.links[0].close()
        return landed(*args)

    monkeypatch.setattr(docks.dock, "name", name)
    handed = remote.hand_over(records)
    assert ended(handed)
    docks.replace()
    again = remote.hand_over(records, again=True)
    assert ended(again) == ""
    assert RowReader(space).read(again.records()[0].tokens).tolist() == [0, 1, 2, 3, 4]
    assert len(space.names("rollout/0")) == 1


def test_a_full_memory_is_waited_for_and_then_the_parcel_is_sent_again(space, remote, docks, monkeypatch):
    room, errors = docks.dock.room, [SegmentSpaceError("s", space.root, 10, 0)] * 3

    def full(*args, **more):
        if errors:
            raise errors.pop()
        return room(*args, **more)

    monkeypatch.setattr(docks.dock, "room", full)
    monkeypatch.setattr(docking, "PATIENCE_S", WAIT_S)
    handed = remote.hand_over(written(remote))
    assert ended(handed) == ""
    assert len(docks.full) == 1
    monkeypatch.setattr(docking, "PATIENCE_S", 0.0)
    errors.append(SegmentSpaceError("s", space.root, 10, 0))
    handed = remote.hand_over(written(remote))
    assert "full" in ended(handed) or "bytes" in ended(handed)
    assert ended(remote.hand_over(handed.sent, again=True)) == ""
    assert len(docks.links) == 1  # refusing a parcel is no reason to end the link


@pytest.mark.parametrize("step", ["room", "name"])
def test_any_other_refusal_is_raised(remote, docks, monkeypatch, step):
    def refuse(*_args, **_more):
        raise ValueError("no")

    monkeypatch.setattr(docks.dock, step, refuse)
    handed = remote.hand_over(written(remote))
    eventually(handed.done)
    with pytest.raises(RemoteError, match="no"):
        handed.failure()
    assert docks.dock.arriving == 0


def test_what_was_damaged_on_its_way_is_sent_again(space, remote, docks, monkeypatch):
    sums = iter([7])
    monkeypatch.setattr(link_jobs, "summed", lambda views: next(sums, None) or summed(views))
    handed = remote.hand_over(written(remote))
    assert ended(handed)
    again = remote.hand_over(handed.sent, again=True)
    assert ended(again) == ""
    assert ["damaged" in str(error) for error in docks.ended] == [True]
    assert RowReader(space).read(again.records()[0].tokens).tolist() == [0, 1, 2, 3, 4]


def test_a_link_on_which_nothing_moves_is_given_up(space, remote, docks, monkeypatch):
    monkeypatch.setattr(carrying, "STALL_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(docking, "point", lambda _name: go_on.wait(WAIT_S))
    fetching = remote.fetch([RowWriter(space, Holder("x", 1)).write([{"a": data_of(9)}])[0]["a"]])
    eventually(lambda: fetching.missing() is None)
    assert "answered nothing for 0.2 s" in str(fetching._asked[0][1].exception())
    go_on.set()
    eventually(fetching.done)


def test_an_incarnation_that_is_gone_gets_nothing_in(space, remote, docks):
    docks.dock.forget(PRODUCER.name, PRODUCER.incarnation)
    handed = remote.hand_over(written(remote))
    assert ended(handed)
    assert "taken for dead" in str(docks.ended[0])
    assert space.names("rollout/0") == []


def test_rows_on_their_way_are_counted_until_they_are_there(remote, docks, monkeypatch):
    monkeypatch.setattr(remote_rows, "CROWDED_BYTES", 100)
    go_on = threading.Event()
    monkeypatch.setattr("relax_actor.transfer_queue.dock.point", lambda _name: go_on.wait(WAIT_S))
    handed = remote.hand_over(written(remote))
    assert not handed.done()
    assert remote.is_crowded
    go_on.set()
    assert ended(handed) == ""
    handed.records()
    assert not remote.is_crowded


def test_who_waits_is_woken(docks):
    woken = threading.Event()
    with closing(RemoteRows(docks, PRODUCER, RUN, wake=woken.set)) as remote:
        handed = remote.hand_over(written(remote))
        assert woken.wait(WAIT_S)
        assert handed.done()


def test_a_way_that_is_closed_lets_nobody_wait(docks):
    remote = RemoteRows(docks, PRODUCER, RUN)
    assert ended(remote.hand_over(written(remote))) == ""
    remote.close()
    assert ended(remote.hand_over(written(remote)))
    eventually(lambda: not docks.links[0].is_open)


def test_a_put_that_no_parcel_holds_is_refused_by_name(remote, monkeypatch):
    monkeypatch.setattr(remote_rows, "PARCEL_BYTES", 100)
    with pytest.raises(ParcelTooLargeError, match="rows of 1000 bytes"):
        remote.write([{"tokens": np.zeros(1000, np.uint8)}])


def test_fetched_rows_are_read_as_they_were_written_each_fetched_once(space, remote, docks):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": array, "none": np.zeros(0, np.int32)}])
    refs = [row["a"], row["none"], row["a"]]
    fetched(remote, refs)
    assert np.array_equal(remote.read(row["a"]), array)
    assert remote.read(row["a"]).dtype == np.float32
    assert not remote.read(row["a"]).flags.writeable
    assert remote.read(row["none"]).shape == (0,)
    assert docks.traffic.slices == 2
    fetched(remote, refs)
    assert docks.traffic.slices == 2
    assert docks.traffic.given_bytes == 48


def test_large_arrays_are_fetched_in_slices(space, remote, docks, monkeypatch):
    monkeypatch.setattr(remote_rows, "requests_for", lambda refs: requests_for(refs, part_bytes=1000))
    array = np.arange(1500, dtype=np.int32)
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": array}])
    fetched(remote, [row["a"]])
    assert np.array_equal(remote.read(row["a"]), array)
    assert docks.traffic.slices == 6


def test_what_is_asked_for_overtakes_a_parcel(space, remote, docks, monkeypatch):
    """Between two of its parts."""
    monkeypatch.setattr(link_jobs, "spans", lambda nbytes: spans(nbytes, 200_000))
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": np.arange(4, dtype=np.int32)}])
    is_asked, order = threading.Event(), []

    def point(name):
        order.append(name)
        if name == "part_taken":
            is_asked.wait(WAIT_S)

    monkeypatch.setattr(docking, "point", point)
    handed = remote.hand_over([remote.write([{"a": data_of(20 << 20)}])[0]["a"]])
    eventually(lambda: order)
    arrival = remote.fetch([row["a"]])
    is_asked.set()
    eventually(arrival.done)
    assert ended(handed) == ""
    assert order.index("rows_given") < len(order) - 1


def test_a_row_that_was_freed_is_missing_here_too(space, remote):
    writer = RowWriter(space, Holder("prompts", 1))
    (row,), (other,) = (writer.write([{"a": np.zeros(4, np.int32)}]) for _ in range(2))
    space.unlink(row["a"].segment)
    fetched(remote, [row["a"], other["a"]])
    with pytest.raises(SegmentMissingError):
        remote.read(row["a"])
    assert remote.read(other["a"]).tolist() == [0] * 4


def test_what_a_dead_dock_did_not_give_is_asked_for_again(space, remote, docks):
    writer = RowWriter(space, Holder("prompts", 1))
    (row,) = writer.write([{"a": np.arange(4, dtype=np.int32)}])
    docks.errors = [DIED]
    fetched(remote, [row["a"]])
    assert remote.read(row["a"]).tolist() == [0, 1, 2, 3]
    wrong = TensorRef(row["a"].segment, 0, "int32", (10**6,))
    arrival = remote.fetch([wrong])
    eventually(lambda: arrival.missing() is None)
    with pytest.raises(RemoteError):
        arrival.done()


def test_of_the_rows_fetched_before_as_many_are_kept_as_there_is_room_for(space, docks):
    with closing(RemoteRows(docks, PRODUCER, RUN, cached_bytes=130)) as remote:
        writer = RowWriter(space, Holder("prompts", 1))
        old, newer, new = (writer.write([{"a": np.full(60, n, np.uint8)}])[0]["a"] for n in range(3))
        for each in (old, newer, new):
            fetched(remote, [each])
        with pytest.raises(SegmentMissingError):
            remote.read(old)
        assert remote.read(newer).tolist() == [1] * 60


def test_fetched_rows_make_room_but_never_those_that_are_about_to_be_read(space, docks):
    with closing(RemoteRows(docks, PRODUCER, RUN, cached_bytes=100)) as remote:
        writer = RowWriter(space, Holder("prompts", 1))
        old, kept, new = (writer.write([{"a": np.full(60, n, np.uint8)}])[0]["a"] for n in range(3))
        fetched(remote, [old])
        fetched(remote, [kept])
        with pytest.raises(SegmentMissingError):
            remote.read(old)
        fetched(remote, [kept, new])
        assert remote.read(kept).tolist() == [1] * 60
        assert remote.read(new).tolist() == [2] * 60
        assert docks.traffic.slices == 3


# -- a peer that says what nobody says ---------------------------------------------------------------


@pytest.fixture
def raw(docks):
    """A stream to a dock, without the peer's end of the link."""
    admission = docks.ask(RowDock.admit, PRODUCER, 1).result()
    with Stream.connect(docks.listener.address, admission.ticket, WAIT_S) as stream:
        yield stream


def part(at=0, total=10, parcel=1):
    return encode(
        Part(number=1, parcel=parcel, at=at, total_bytes=total, xxh3=summed([memoryview(b"12345")]))
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([(part(at=5), b"12345")], "sent 5 bytes of parcel 1 from 5, out of turn"),
        ([(part(), b"12345"), (part(at=5, total=20), b"12345")], "out of turn"),
        ([(part(), b"12345"), (part(at=5, parcel=2), b"12345")], "out of turn"),
        ([(part(total=3), b"12345")], "out of turn"),
        ([(part(), b"")], "sent 0 bytes"),
        ([(encode(Want(number=1, slices=())), b"x")], "sent 1 bytes that belong to nothing"),
        ([(b"\xc1", b"")], "carried what nobody says"),
    ],
)
def test_a_dock_ends_a_link_that_makes_no_sense(docks, raw, said, why):
    for record, payload in said:
        raw.send(record, memoryview(payload))
    eventually(lambda: docks.ended)
    assert why in str(docks.ended[0])
    eventually(lambda: docks.dock.arriving == 0)


class Liar:
    """A dock that answers with whatever the test says."""

    def __init__(self, answer, payload=b""):
        self.listener = StreamListener("127.0.0.1", WAIT_S)
        self._answer, self._payload = answer, payload

    def ask(self, _method, *_args):
        return Answer(Admission(address=str(self.listener.address), ticket=self.listener.ticket(self._serve)))

    def _serve(self, stream):
        with suppress(StreamError):
            _, nbytes = stream.receive()
            stream.receive_into(memoryview(bytearray(nbytes)))
            stream.send(encode(self._answer), memoryview(self._payload))
            stream.receive()

    def close(self):
        self.listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        Given(number=1, sizes=(), xxh3=0),
        Docked(number=99, segment="s", offset=0),
    ],
)
def test_a_peer_ends_a_link_that_makes_no_sense(answer):
    with closing(Liar(answer)) as liar, closing(RemoteRows(liar, PRODUCER, RUN)) as rows:
        assert "answered" in ended(rows.hand_over(written(rows)))


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        (Docked(number=1, segment="s", offset=0), b""),
        (Given(number=1, sizes=(4, 4), xxh3=0), b"12345678"),
        (Given(number=1, sizes=(3,), xxh3=0), b"123"),
        (Given(number=1, sizes=(4,), xxh3=0), b"123"),
        (Given(number=1, sizes=(4,), xxh3=0), b"1234"),
    ],
)
def test_what_was_not_asked_for_is_never_read(answer, payload):
    with closing(Liar(answer, payload)) as liar, closing(RemoteRows(liar, PRODUCER, RUN)) as rows:
        arrival = rows.fetch([TensorRef("s", 0, "int32", (1,))])
        eventually(lambda: arrival.missing() is None)
        assert isinstance(arrival._asked[0][1].exception(), RowLinkError)
        assert not arrival.done()


def test_on_the_queues_host_rows_need_not_travel(space):
    local = LocalRows(RowReader(space), RowWriter(space, PRODUCER))
    records = written(local)
    handed = local.hand_over(records)
    assert handed.done()
    assert handed.failure() == ""
    assert handed.records() == records == handed.sent
    assert local.fetch([records[0].tokens]).done()
    assert local.read(records[0].tokens).tolist() == [0, 1, 2, 3, 4]
    assert not local.is_crowded
