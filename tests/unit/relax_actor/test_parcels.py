"""Rows that travel between hosts arrive as they were, once, whatever is lost or repeated on the way."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_actor.errors import ActorDied, Executed, RemoteError
from relax_actor.ids import Holder
from relax_actor.protocol import FinishReason, SampleReady, TensorRef
from relax_actor.roles import remote_rows
from relax_actor.roles.dock import RowDock
from relax_actor.roles.remote_rows import RemoteRows
from relax_actor.roles.rows import LocalRows
from relax_actor.transfer_queue.dock import Dock
from relax_actor.transfer_queue.parcels import ParcelTooLargeError, parts_of, requests_for
from relax_actor.transfer_queue.storage import RowReader, RowWriter
from transport.segment import parse_name
from transport.shm import SegmentMissingError, ShmSpace

RUN = "ab12cd34"
PRODUCER = Holder("rollout/0", 2)


@pytest.fixture
def space(tmp_path):
    return ShmSpace(RUN, tmp_path)


@pytest.fixture
def dock(space):
    return Dock(space, Holder("dock", 1))


def data_of(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def send(dock, number, data, *, again=False, part_bytes=100, holder=PRODUCER):
    answers = [
        dock.take(holder, part) for part in parts_of(number, data, is_repeated=again, part_bytes=part_bytes)
    ]
    return answers[-1]


def bytes_at(space, docked, nbytes):
    ref = TensorRef(segment=docked.segment, offset=docked.offset, dtype="uint8", shape=(nbytes,))
    return RowReader(space).read(ref).tobytes()


# -- the dock ----------------------------------------------------------------------------------------


def test_a_whole_parcel_is_its_producers_and_lies_there_as_it_was(space, dock):
    data = data_of(1050)
    docked = send(dock, 7, data)
    assert bytes_at(space, docked, 1050) == data.tobytes()
    name = parse_name(docked.segment)
    assert (name.owner, name.incarnation) == ("rollout/0", 2)


def test_nothing_has_a_name_of_the_producers_before_it_is_whole(space, dock):
    *some, last = parts_of(1, data_of(250), is_repeated=False, part_bytes=100)
    assert [dock.take(PRODUCER, part) for part in some] == [None, None]
    assert space.names("rollout/0") == []
    assert dock.arriving == 1
    assert dock.take(PRODUCER, last) is not None
    assert dock.arriving == 0


def test_a_parcel_sent_again_is_stored_once(space, dock):
    data = data_of(250)
    docked = send(dock, 1, data)
    assert send(dock, 1, data, again=True) == docked
    assert len(space.names("rollout/0")) == 1


def test_a_parcel_that_an_earlier_dock_stored_is_found(space, dock):
    """The dock died before it could answer."""
    send(dock, 1, data_of(90, seed=1))
    data = data_of(250, seed=2)
    docked = send(dock, 2, data)
    space.sweep("dock", 1)  # as its node agent does
    successor = Dock(space, Holder("dock", 2))
    assert send(successor, 2, data, again=True) == docked
    assert bytes_at(space, docked, 250) == data.tobytes()
    assert successor.arriving == 0


def test_what_is_sent_again_to_a_dock_that_has_nothing_is_stored(space, dock):
    data = data_of(250)
    assert bytes_at(space, send(dock, 1, data, again=True), 250) == data.tobytes()


def test_what_a_producer_that_is_gone_did_not_put_is_freed(space, dock):
    send(dock, 1, data_of(50))
    first, _ = parts_of(2, data_of(150), is_repeated=False, part_bytes=100)
    dock.take(PRODUCER, first)
    adopted = space.adopt(send(dock, 3, data_of(50)).segment, "rows", 1)
    dock.forget("rollout/0", 2)
    assert space.names("rollout/0") == []
    assert dock.arriving == 0
    assert space.exists(adopted)
    assert send(dock, 4, data_of(50)) is None  # it was on its way when its sender died
    assert send(dock, 1, data_of(50), holder=Holder("rollout/0", 3)) is not None


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(order=st.permutations(range(5)), repeats=st.lists(st.integers(0, 4), max_size=4))
def test_parts_may_come_in_any_order_and_more_than_once(tmp_path_factory, order, repeats):
    space = ShmSpace(RUN, tmp_path_factory.mktemp("parts"))
    dock, data = Dock(space, Holder("dock", 1)), data_of(450)
    parts = list(parts_of(1, data, is_repeated=False, part_bytes=100))
    answers = [dock.take(PRODUCER, parts[index]) for index in [*order[:2], *repeats, *order[2:]]]
    assert dock.arriving == 0
    assert bytes_at(space, answers[-1] or next(filter(None, answers)), 450) == data.tobytes()
    assert len(space.names("rollout/0")) == 1


# -- how arrays are cut ------------------------------------------------------------------------------


def ref_of(nbytes, name="s"):
    return TensorRef(segment=name, offset=0, dtype="uint8", shape=(nbytes,))


def test_no_request_is_for_more_than_a_part_and_all_bytes_are_asked_for_once():
    refs = [ref_of(n, str(n)) for n in (30, 250, 0, 70, 100, 1)]
    requests = requests_for(refs, part_bytes=100)
    assert all(sum(piece.stop - piece.start for piece in request) <= 100 for request in requests)
    asked = [piece for request in requests for piece in request]
    for ref in refs:
        spans = [(piece.start, piece.stop) for piece in asked if piece.ref == ref]
        assert spans[0][0] == 0
        assert spans[-1][1] == ref.shape[0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


def test_arrays_beyond_4_gib_are_cut_without_their_bytes():
    """Sparse: nothing of that size is written or read here."""
    nbytes = 5 * 2**30 + 3
    data = np.broadcast_to(np.zeros(1, np.uint8), (nbytes,))
    parts = parts_of(1, data, is_repeated=False)
    ends = [(part.at, part.data.size, part.total_bytes) for part in parts]
    assert ends[-1][0] + ends[-1][1] == nbytes == ends[-1][2]
    assert sum(size for _, size, _ in ends) == nbytes
    pieces = [piece for request in requests_for([ref_of(nbytes)]) for piece in request]
    assert pieces[-1].stop == nbytes
    assert sum(piece.stop - piece.start for piece in pieces) == nbytes


# -- an actor's way to the rows ----------------------------------------------------------------------


class Answer:
    """A reply that is there, or will be when the test says so."""

    def __init__(self, value=None, error=None, *, is_here=True):
        self._value, self._error, self.is_here = value, error, is_here

    def done(self):
        return self.is_here

    def exception(self):
        return self._error

    def result(self):
        if self._error is not None:
            raise self._error
        return self._value


class DockRef:
    """A dock in this process; `errors` are raised by its next answers, `mute` ones are not given."""

    def __init__(self, space, dock):
        self._dock, self._reader = dock, RowReader(space)
        self.errors, self.asked, self.held = [], [], []
        self.is_slow = False

    def ask(self, method, *args):
        self.asked.append((method.__name__, args))
        if self.errors and (error := self.errors.pop(0)) is not None:
            return Answer(error=error)
        answer = Answer(self._dock.take(*args) if method is RowDock.take else self._give(*args))
        answer.is_here = not self.is_slow
        self.held.append(answer)
        return answer

    def _give(self, slices):
        return [self._bytes(piece) for piece in slices]

    def _bytes(self, piece):
        try:
            flat = self._reader.read(piece.ref).reshape(-1).view(np.uint8)
        except SegmentMissingError:
            return None
        return flat[piece.start : piece.stop]


DIED = ActorDied("dock", 1, "SIGKILL", Executed.MAYBE)


def refused(type_name):
    return RemoteError("dock", type_name, "no", "traceback")


@pytest.fixture
def ref(space, dock):
    return DockRef(space, dock)


@pytest.fixture
def remote(ref):
    return RemoteRows(ref, PRODUCER, RUN)


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


def test_rows_handed_over_are_read_in_place_on_the_queues_host(space, remote):
    handed = remote.hand_over(written(remote))
    assert handed.done()
    assert handed.failure() == ""
    first, second = handed.records()
    reader = RowReader(space)
    assert reader.read(first.tokens).tolist() == [0, 1, 2, 3, 4]
    assert reader.read(second.logprobs).tolist() == [-1.0] * 5
    assert first.tokens.segment == second.versions.segment
    assert not remote.is_crowded


def test_no_rows_are_no_parcel(remote):
    assert remote.write([]) == []


def test_what_a_dead_dock_did_not_answer_is_handed_over_again(space, remote, ref):
    ref.errors = [DIED]
    records = written(remote)
    handed = remote.hand_over(records)
    assert "SIGKILL" in handed.failure()
    again = remote.hand_over(handed.sent, again=True)
    assert again.failure() == ""
    assert RowReader(space).read(again.records()[0].tokens).tolist() == [0, 1, 2, 3, 4]


def test_parts_that_two_docks_got_are_handed_over_again(space, remote, ref, monkeypatch):
    """The first half died with the first dock, after it had answered."""
    monkeypatch.setattr(remote_rows, "parts_of", lambda *args, **more: parts_of(*args, part_bytes=64, **more))
    records = written(remote, n=20)
    docks = [ref._dock] * 2 + [Dock(space, Holder("dock", 2))] * 100
    ref.ask = lambda _method, *args: Answer(docks.pop(0).take(*args))
    handed = remote.hand_over(records)
    assert handed.done()
    assert handed.failure() == "the dock was replaced in between"


def test_a_full_memory_is_waited_for_and_any_other_refusal_is_raised(remote, ref):
    ref.errors = [refused("SegmentSpaceError")]
    assert remote.hand_over(written(remote)).failure()
    ref.errors = [refused("ValueError")]
    handed = remote.hand_over(written(remote))
    with pytest.raises(RemoteError):
        handed.failure()


def test_rows_on_their_way_are_counted_until_they_are_there(remote, ref, monkeypatch):
    monkeypatch.setattr(remote_rows, "CROWDED_BYTES", 100)
    ref.is_slow = True
    handed = remote.hand_over(written(remote))
    assert not handed.done()
    assert remote.is_crowded
    ref.held[0].is_here = True
    assert handed.done()
    handed.records()
    assert not remote.is_crowded


def test_a_put_that_no_parcel_holds_is_refused_by_name(remote, monkeypatch):
    monkeypatch.setattr(remote_rows, "PARCEL_BYTES", 100)
    with pytest.raises(ParcelTooLargeError, match="rows of 1000 bytes"):
        remote.write([{"tokens": np.zeros(1000, np.uint8)}])


def test_fetched_rows_are_read_as_they_were_written_each_fetched_once(space, remote, ref):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": array, "none": np.zeros(0, np.int32)}])
    refs = [row["a"], row["none"], row["a"]]
    assert remote.fetch(refs).done()
    assert np.array_equal(remote.read(row["a"]), array)
    assert remote.read(row["a"]).dtype == np.float32
    assert not remote.read(row["a"]).flags.writeable
    assert remote.read(row["none"]).shape == (0,)
    asked = len(ref.asked)
    assert remote.fetch(refs).done()
    assert len(ref.asked) == asked == 1


def test_large_arrays_are_fetched_in_slices(space, remote, ref, monkeypatch):
    monkeypatch.setattr(remote_rows, "requests_for", lambda refs: requests_for(refs, part_bytes=1000))
    array = np.arange(1500, dtype=np.int32)
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": array}])
    assert remote.fetch([row["a"]]).done()
    assert np.array_equal(remote.read(row["a"]), array)
    assert len(ref.asked) == 6


def test_a_row_that_was_freed_is_missing_here_too(space, remote):
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": np.zeros(4, np.int32)}])
    space.unlink(row["a"].segment)
    assert remote.fetch([row["a"]]).done()
    with pytest.raises(SegmentMissingError):
        remote.read(row["a"])


def test_what_a_dead_dock_did_not_give_is_asked_for_again(space, remote, ref):
    writer = RowWriter(space, Holder("prompts", 1))
    (row,) = writer.write([{"a": np.arange(4, dtype=np.int32)}])
    ref.errors = [DIED]
    fetching = remote.fetch([row["a"]])
    assert not fetching.done()
    assert fetching.done()
    assert remote.read(row["a"]).tolist() == [0, 1, 2, 3]
    ref.errors = [refused("RowRefError")]
    (other,) = writer.write([{"a": np.zeros(9, np.int32)}])
    with pytest.raises(RemoteError):
        remote.fetch([other["a"]]).done()


def test_rows_that_are_not_here_yet_are_waited_for(space, remote, ref):
    ref.is_slow = True
    (row,) = RowWriter(space, Holder("prompts", 1)).write([{"a": np.arange(4, dtype=np.int32)}])
    fetching = remote.fetch([row["a"]])
    assert not fetching.done()
    ref.held[0].is_here = True
    assert fetching.done()
    assert remote.read(row["a"]).tolist() == [0, 1, 2, 3]


def test_of_the_rows_fetched_before_as_many_are_kept_as_there_is_room_for(space, ref):
    remote = RemoteRows(ref, PRODUCER, RUN, cached_bytes=130)
    writer = RowWriter(space, Holder("prompts", 1))
    old, newer, new = (writer.write([{"a": np.full(60, n, np.uint8)}])[0]["a"] for n in range(3))
    assert all(remote.fetch([each]).done() for each in (old, newer, new))
    with pytest.raises(SegmentMissingError):
        remote.read(old)
    assert remote.read(newer).tolist() == [1] * 60


def test_fetched_rows_make_room_but_never_those_that_are_about_to_be_read(space, ref):
    remote = RemoteRows(ref, PRODUCER, RUN, cached_bytes=100)
    writer = RowWriter(space, Holder("prompts", 1))
    old, kept, new = (writer.write([{"a": np.full(60, n, np.uint8)}])[0]["a"] for n in range(3))
    assert remote.fetch([old]).done()
    assert remote.fetch([kept]).done()
    with pytest.raises(SegmentMissingError):
        remote.read(old)
    assert remote.fetch([kept, new]).done()
    assert remote.read(kept).tolist() == [1] * 60
    assert remote.read(new).tolist() == [2] * 60
    assert len(ref.asked) == 3


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
