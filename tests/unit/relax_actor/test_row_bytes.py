"""How rows become bytes and how a consumer looks at them; how both kinds of code wait."""

import asyncio
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from relax_actor.row_queue.batch import Batch, OpenLease, cuts, refs_of
from relax_actor.row_queue.blocks import Layout, by_group
from relax_actor.row_queue.both import Pause, awaiting, blocking
from relax_actor.row_queue.records import Column, RowPart


def laid_out(fields):
    """Return the columns of fields, and what reads them."""
    layout = Layout(fields)
    memory = bytearray(layout.nbytes + 64)
    columns = layout.copy_to(memoryview(memory), "s", 64)

    def read(ref):
        return np.ndarray(ref.shape, ref.dtype, buffer=memory, offset=ref.offset)

    return columns, read


def batch_of(parts, shared=None, read=None):
    return Batch(OpenLease(1, 1), parts, shared or {}, read, was_waited_for=False)


FIELDS = {
    "tokens": [np.arange(3, dtype=np.int32), np.arange(10, 12, dtype=np.int32)],
    "image": [np.ones((2, 4), np.float32), np.zeros((1, 4), np.float32)],
    "reward": np.array([0.5, 1.5]),
}


def test_fields_lie_one_after_the_other_each_at_a_cache_line():
    columns, _ = laid_out(FIELDS)
    assert [column.offset for column in columns.values()] == [64, 128, 192]
    assert columns["image"] == Column("s", 128, "float32", (4,), (2, 1))


def test_a_batch_is_seen_end_to_end_and_row_by_row():
    columns, read = laid_out(FIELDS)
    batch = batch_of([RowPart(5, 2, columns, (7, 8))], read=read)
    assert (batch.rows, batch.keys, len(batch), set(batch.fields)) == ([5, 6], [7, 8], 2, set(FIELDS))
    assert batch.packed("tokens").tolist() == [0, 1, 2, 10, 11]
    assert [view.shape for view in batch.views("image")] == [(2, 4), (1, 4)]
    assert batch.lengths("reward") == [1, 1]


def test_rows_of_several_puts_are_joined_and_cut():
    columns, read = laid_out(FIELDS)
    parts = [RowPart(0, 2, columns, (7, 7)), RowPart(4, 2, columns, (8, 8))]
    batch = batch_of(parts, read=read)
    assert batch.packed("tokens").tolist() == [0, 1, 2, 10, 11] * 2
    pieces = [batch_of(piece, read=read) for piece in cuts(parts, 3)]
    assert [piece.rows for piece in pieces] == [[0, 1, 4], [5]]
    assert [piece.keys for piece in pieces] == [[7, 7, 8], [8]]
    assert pieces[1].packed("tokens").tolist() == [10, 11]
    assert len(list(refs_of(parts, {7: columns}))) == 9


def test_an_empty_share_has_no_rows():
    batch = batch_of([])
    assert (len(batch), batch.rows, batch.keys, batch.fields) == (0, [], [], ())
    with pytest.raises(ValueError, match="at least one array"):
        batch.packed("tokens")


def test_rows_of_a_group_see_what_they_share():
    columns, read = laid_out({"image": [np.arange(4)]})
    part = RowPart(0, 2, {"tokens": Column("s", 0, "int8", (), (1, 1))}, (7, 7))
    batch = batch_of([part], {7: columns}, read)
    assert set(batch.fields) == {"tokens", "image"}
    assert [view.tolist() for view in batch.views("image")] == [[0, 1, 2, 3]] * 2
    assert batch.lengths("image") == [4, 4]
    assert batch.packed("image").tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ([], "no rows"),
        (np.ones((2, 2)), "one number a row"),
        ([np.array(1.0)], "beside"),
        ([np.ones(2), np.ones(2, np.int8)], "beside"),
        ([np.ones((1, 2)), np.ones((1, 3))], "beside"),
        ([np.array(["a"])], "of numbers"),
    ],
)
def test_arrays_that_do_not_fit_together_are_named(values, fact):
    with pytest.raises(ValueError, match=fact):
        Layout({"field": values})


def test_shared_fields_are_of_the_same_groups():
    assert by_group({}) == ((), {})
    with pytest.raises(ValueError, match="of groups"):
        by_group({"a": {7: np.ones(1)}, "b": {8: np.ones(1)}})


def steps(reply, seen, answer_later):
    """Wait for a reply in three ways, and say what was seen of it."""
    yield Pause(reply, 0.01)
    seen.append(reply.done())
    answer_later()
    yield Pause(timeout_s=0.001)
    yield Pause(reply)
    seen.append(reply.done())
    yield Pause(reply)
    return reply.result()


@pytest.mark.parametrize("way", [blocking, lambda work: asyncio.run(awaiting(work))])
def test_blocking_and_awaiting_go_the_same_steps(way):
    reply, seen = Future(), []
    timer = threading.Timer(0.05, reply.set_result, ("answer",))
    assert way(steps(reply, seen, timer.start)) == "answer"
    timer.join()
    assert seen == [False, True]


@pytest.mark.parametrize("way", [blocking, lambda work: asyncio.run(awaiting(work))])
def test_a_reply_that_failed_is_an_end_as_well(way):
    reply = Future()
    reply.set_exception(KeyError("gone"))
    with pytest.raises(KeyError):
        way(steps(reply, [], lambda: None))
