"""What the rows of a group have in common: stored once, and gone with the last of them."""

import pytest

from relax_actor.errors import ConfigError
from relax_actor.ids import Holder
from relax_actor.row_queue.records import Column, SharedPut
from relax_actor.row_queue.spec import ConsumerGroup, QueueSpec, TokenBudget, WholeGroups
from relax_actor.row_queue.table import SHORT, Table
from relax_actor.transfer_queue.records import Put

SPEC = QueueSpec(
    fields=("tokens", "image"),
    shared=("image",),
    groups=(
        ConsumerGroup(name="train", needs=("tokens", "image"), sampler=WholeGroups()),
        ConsumerGroup(name="look", needs=("image",)),
    ),
)
A, B = Holder("a", 1), Holder("b", 1)


def column(segment, *lengths):
    return Column(segment, 0, "uint8", (), lengths)


def put(table, seq, keys, *, group_rows=2, images=(), segment=""):
    segment = segment or f"s{seq}"
    shared = SharedPut(tuple(images), {"image": column(segment, *(9 for _ in images))}) if images else None
    return table.put(A, seq, {"tokens": column(segment, *(1 for _ in keys))}, keys, group_rows, shared)


def drained(table, group, rows=9):
    dealt = table.lease(group, B, rows, 0.0)
    table.ack([dealt.lease_id], B)
    return dealt


def again(table):
    return Table.replay(SPEC, table.snapshot())


def test_rows_find_what_their_group_has_whichever_put_brought_it():
    table = Table(SPEC)
    put(table, 1, [7, 8], images=[7, 8])
    put(table, 2, [8, 7])
    dealt = table.lease("train", B, 9, 0.0)
    assert [part.keys for part in dealt.parts] == [(7, 8), (8, 7)]
    assert {key: columns["image"].offset for key, columns in dealt.shared.items()} == {7: 0, 8: 9}
    assert all(set(part.columns) == {"tokens"} for part in dealt.parts)


def test_it_is_here_for_as_long_as_a_row_of_the_group_is_or_may_come():
    table = Table(SPEC)
    put(table, 1, [7], images=[7])
    drained(table, "look")
    table.drop([(0, 1)], "why not")
    assert table.take_freed() == [], "its second row has not been put"
    put(table, 2, [7])
    drained(table, "train")
    assert table.take_freed() == []
    drained(table, "look")
    assert sorted(table.take_freed()) == ["s1", "s2"]
    assert table.segments() == set()


def test_it_does_not_wait_for_rows_that_never_come():
    table = Table(SPEC)
    put(table, 1, [7], images=[7])
    drained(table, "look")
    assert table.lease("train", B, 9, 0.0) is None
    table.end_stream()
    assert [dropped.reason for dropped in table.take_dropped()] == [SHORT]
    assert table.take_freed() == ["s1"]
    assert table.is_finished
    with pytest.raises(ValueError, match="has ended"):
        put(table, 2, [7])


def test_the_first_stays_where_it_is_put_twice():
    table = Table(SPEC)
    put(table, 1, [7], images=[7])
    put(table, 2, [7, 8], images=[7, 8])
    shared = table.lease("train", B, 9, 0.0).shared
    assert shared[7]["image"].segment == "s1"
    put(table, 3, [8])
    assert table.lease("train", B, 9, 0.0).shared[8]["image"] == Column("s2", 9, "uint8", (), (9,))


def test_a_snapshot_has_it_also_where_rows_of_the_group_are_gone():
    table = Table(SPEC)
    put(table, 1, [7], images=[7], group_rows=3)
    put(table, 2, [7], group_rows=3)
    table.drop([(0, 1)], "why not")
    table = again(again(table))
    put(table, 3, [7], group_rows=3)
    dealt = table.lease("train", B, 9, 0.0)
    assert [part.first for part in dealt.parts] == [1, 2]
    table.ack([dealt.lease_id], B)
    table = again(table)
    drained(table, "look")
    assert set(table.take_freed()) >= {"s1"}
    assert table.segments() == set()


@pytest.mark.parametrize(
    ("keys", "shared", "fact"),
    [
        ([7], SharedPut((8,), {"image": column("s", 9)}), "shared fields of 1 groups"),
        ([7], SharedPut((7,), {"image": column("s", 9, 9)}), "2"),
        ([7], SharedPut((7,), {"tokens": column("s", 9)}), "not among the shared"),
        ([6], SharedPut((6,), {"image": column("s", 9)}), "group 6 has rows"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(keys, shared, fact):
    table = Table(SPEC)
    put(table, 1, [6])
    before = table.snapshot()
    with pytest.raises(ValueError, match=fact):
        table.put(A, 2, {"tokens": column("s", 1)}, keys, 2, shared)
    assert table.snapshot() == before


def test_a_shared_field_is_put_by_group_only():
    table = Table(SPEC)
    with pytest.raises(ValueError, match="put by group"):
        table.put(A, 1, {"image": column("s", 1)})
    put(table, 1, [7], images=[7])
    with pytest.raises(ValueError, match="put by group"):
        table.append(A, 2, [(0, 1)], {"image": column("s", 1)})


@pytest.mark.parametrize(
    ("shared", "sampler", "fact"),
    [
        (("film",), WholeGroups(), "film"),
        (("image",), TokenBudget(tokens=1, length_of="image"), "or shared"),
    ],
)
def test_a_spec_is_checked(shared, sampler, fact):
    group = ConsumerGroup(name="g", needs=("image",), sampler=sampler)
    with pytest.raises(ConfigError, match=fact):
        QueueSpec(fields=("image",), shared=shared, groups=(group,)).check()


def test_rows_without_a_group_have_nothing_in_common():
    table = Table(SPEC)
    assert table.put(A, 1, {"tokens": column("s", 1)}) == (Put.ACCEPTED, 0)
    assert table.lease("look", B, 9, 0.0) is None
