"""The decisions of a row queue: each row once to each group, whatever dies, and never one lost."""

import os
import typing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relax_actor.errors import ConfigError
from relax_actor.ids import Holder
from relax_actor.row_queue.records import Column, Event, RowsDropped, decode_events, each, encode_events
from relax_actor.row_queue.spec import ConsumerGroup, Fifo, QueueSpec, TokenBudget, WholeGroups
from relax_actor.row_queue.state import TableState
from relax_actor.row_queue.states import TABLE, RowState, diagram
from relax_actor.row_queue.table import Table
from relax_actor.transfer_queue.records import Put

SPEC = QueueSpec(
    fields=("tokens", "reward"),
    groups=(
        ConsumerGroup(name="score", needs=("tokens",), max_attempts=3),
        ConsumerGroup(name="train", needs=("tokens", "reward"), sampler=WholeGroups(), lease_s=50.0),
    ),
)
A, B, C = Holder("a", 1), Holder("b", 1), Holder("c", 1)


def column(segment, *lengths):
    return Column(segment, 0, "int32", (), lengths)


def put(table, seq, *lengths, keys=(), group_rows=0, **more):
    return table.put(A, seq, {"tokens": column(f"s{seq}", *lengths), **more}, keys, group_rows)


def rows_of(dealt):
    return [row for part in dealt.parts for row in range(part.first, part.first + part.count)]


def table_of(sampler, **options):
    group = ConsumerGroup(name="g", needs=("tokens",), sampler=sampler, **options)
    return Table(QueueSpec(fields=("tokens", "reward"), groups=(group,)))


def test_a_row_is_ready_for_a_group_when_it_has_all_its_fields():
    table = Table(SPEC)
    assert put(table, 1, 3, 4, keys=(7, 7), group_rows=2) == (Put.ACCEPTED, 0)
    assert table.lease("train", B, 8, 0.0) is None
    assert table.append(C, 1, [(1, 2)], {"reward": column("r1", 1)}) is Put.ACCEPTED
    assert table.lease("train", B, 8, 0.0) is None, "half a group is none"
    table.append(C, 2, [(0, 1)], {"reward": column("r2", 1)})
    dealt = table.lease("train", B, 8, 0.0)
    assert rows_of(dealt) == [0, 1]
    assert [part.columns["reward"].segment for part in dealt.parts] == ["r2", "r1"]
    assert [part.columns["tokens"].offset for part in dealt.parts] == [0, 12]


def test_rows_go_when_every_group_is_done_with_them():
    table = Table(SPEC)
    put(table, 1, 3, keys=(7,), group_rows=1, reward=column("s1", 1))
    for name in ("score", "train"):
        assert table.take_freed() == []
        table.ack([table.lease(name, B, 8, 0.0).lease_id], B)
    assert table.take_freed() == ["s1"]
    table.end_stream()
    assert table.is_finished


def test_fifo_deals_in_order_and_what_came_back_first():
    table = table_of(Fifo())
    put(table, 1, 1, 1, 1)
    put(table, 2, 1, 1)
    first, second = table.lease("g", B, 2, 0.0), table.lease("g", C, 2, 0.0)
    assert (rows_of(first), rows_of(second)) == ([0, 1], [2, 3])
    table.holder_gone("b", 1)
    assert rows_of(table.lease("g", C, 8, 0.0)) == [0, 1, 4]
    assert table.lease("g", B, 8, 0.0) is None, "a dead incarnation gets nothing"


def test_an_acknowledgement_counts_once_and_only_from_the_holder():
    table = table_of(Fifo())
    put(table, 1, 1)
    lease = table.lease("g", B, 1, 0.0)
    assert table.ack([lease.lease_id], C) == [Put.STALE]
    assert table.ack([lease.lease_id], B) == [Put.ACCEPTED]
    assert table.ack([lease.lease_id], B) == [Put.STALE]
    assert table.progress("g") == {
        "put": 1, "acked": 1, "dropped": 0, "leased": 0, "ready": 0, "incomplete": 0,
    }  # fmt: skip


def test_a_repeated_put_is_recognised_and_one_of_the_dead_refused():
    table = table_of(Fifo())
    assert put(table, 1, 1, 1) == (Put.ACCEPTED, 0)
    assert put(table, 2, 1) == (Put.ACCEPTED, 2)
    assert put(table, 1, 1, 1) == (Put.DUPLICATE, 0)
    table.holder_gone("a", 1)
    assert put(table, 3, 1)[0] is Put.STALE
    assert table.put(Holder("a", 2), 1, {"tokens": column("x", 1)}) == (Put.ACCEPTED, 3)


def test_a_lease_that_runs_out_is_dealt_again_and_poison_is_dropped_with_a_reason():
    table = table_of(Fifo(), lease_s=5.0, max_attempts=2)
    put(table, 1, 1)
    for turn in range(2):
        assert table.lease("g", B, 1, 10.0 * turn) is not None
        assert table.next_deadline() == 10.0 * turn + 5.0
        assert table.expire(10.0 * turn + 4.9) == []
        assert len(table.expire(10.0 * turn + 5.0)) == 1
    assert table.lease("g", B, 1, 30.0) is None
    assert [(each.rows, each.group) for each in table.take_dropped()] == [([(0, 1)], "g")]
    assert table.take_freed() == ["s1"]


def test_a_lost_answer_is_dealt_again_without_blame():
    table = table_of(Fifo(), max_attempts=1)
    put(table, 1, 1)
    table.lease("g", B, 1, 0.0)
    table.retain(B, [], "g")
    assert rows_of(table.lease("g", B, 1, 0.0)) == [0]


def test_a_dropped_row_no_longer_holds_its_group_up():
    table = Table(SPEC)
    put(table, 1, 1, 1, keys=(7, 7), group_rows=2)
    table.append(C, 1, [(0, 1)], {"reward": column("r", 1)})
    table.drop([(1, 2)], "no reward")
    assert rows_of(table.lease("train", B, 8, 0.0)) == [0]
    assert table.append(C, 2, [(1, 2)], {"reward": column("r2", 1)}) is Put.STALE
    assert table.progress("train")["dropped"] == 1


def test_a_row_dropped_while_it_is_lent_is_not_dealt_again():
    table = table_of(Fifo())
    put(table, 1, 1, 1)
    lease = table.lease("g", B, 2, 0.0)
    table.drop([(0, 1)], "not wanted")
    table.holder_gone("b", 1)
    assert rows_of(table.lease("g", C, 2, 0.0)) == [1]
    assert table.ack([lease.lease_id], B) == [Put.STALE]


def test_whole_groups_are_dealt_as_far_as_they_fit_but_always_one():
    table = table_of(WholeGroups())
    put(table, 1, 1, 1, 1, keys=(1, 1, 1), group_rows=3)
    put(table, 2, 1, 1, keys=(2, 2), group_rows=2)
    assert rows_of(table.lease("g", B, 2, 0.0)) == [0, 1, 2]
    assert rows_of(table.lease("g", B, 2, 0.0)) == [3, 4]


def test_a_turn_gives_every_rank_about_as_many_tokens_and_none_too_many():
    table = table_of(TokenBudget(tokens=10, ranks=2))
    put(table, 1, 9, 2, 2, 3)
    assert table.lease("g", B, 0, 0.0, rank=0) is None, "16 of 20 tokens are there"
    put(table, 2, 4)
    shares = [table.lease("g", holder, 0, 0.0, rank=rank) for rank, holder in ((1, C), (0, B))]
    tokens = [
        sum(length for part in share.parts for length in part.columns["tokens"].lengths) for share in shares
    ]
    assert tokens == [9, 9]
    assert table.lease("g", B, 0, 0.0, rank=0) is None
    table.end_stream()
    assert rows_of(table.lease("g", B, 0, 0.0, rank=0)) == [2]
    assert table.lease("g", C, 0, 0.0, rank=1).parts == (), "a turn is a turn for every rank"


def test_a_rank_that_comes_back_gets_its_own_share_again():
    table = table_of(TokenBudget(tokens=4, ranks=2))
    put(table, 1, 4, 4)
    first = table.lease("g", B, 0, 0.0, rank=0)
    table.holder_gone("b", 1)
    again = table.lease("g", Holder("b", 2), 0, 0.0, rank=0)
    assert rows_of(again) == rows_of(first)
    assert rows_of(table.lease("g", C, 0, 0.0, rank=1)) != rows_of(first)


def test_a_longer_row_than_the_budget_has_a_share_to_itself():
    table = table_of(TokenBudget(tokens=4, ranks=1))
    put(table, 1, 9, 1)
    assert rows_of(table.lease("g", B, 0, 0.0)) == [0]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    budget=st.integers(5, 60),
)
def test_ranks_get_equal_work_within_their_budget_and_no_row_waits_for_ever(lengths, ranks, budget):
    """In each turn the ranks differ by one row at most, and the row that has waited longest is in it."""
    table = table_of(TokenBudget(tokens=budget, ranks=ranks))
    put(table, 1, *lengths)
    table.end_stream()
    waiting = dict(enumerate(lengths))
    while waiting:
        shares = [rows_of(table.lease("g", B, 0, 0.0, rank=rank)) for rank in range(ranks)]
        tokens = [sum(lengths[row] for row in share) for share in shares]
        dealt = [row for share in shares for row in share]
        assert max(tokens) - min(tokens) <= max(lengths[row] for row in dealt)
        assert all(each <= budget or len(share) == 1 for each, share in zip(tokens, shares, strict=True))
        assert min(waiting) in dealt
        for row in dealt:
            del waiting[row]


def test_turns_keep_their_order_through_a_snapshot_whoever_has_had_a_share():
    """A rank ahead of the others gets no turn twice, and none that is not one, empty ones included."""
    table = table_of(TokenBudget(tokens=4, ranks=2))
    put(table, 1, 4, 4, 4, 4, 4)
    table.end_stream()
    ahead = [rows_of(table.lease("g", B, 0, 0.0, rank=0)) for _ in range(2)]
    behind = rows_of(table.lease("g", C, 0, 0.0, rank=1))
    table = Table.replay(table.spec, decode_events(encode_events(table.snapshot())))
    assert (ahead, behind) == ([[0], [2]], [1])
    assert rows_of(table.lease("g", C, 0, 0.0, rank=1)) == [3]
    assert rows_of(table.lease("g", C, 0, 0.0, rank=1)) == [], "it deals the last turn, of one row"
    table = Table.replay(table.spec, decode_events(encode_events(table.snapshot())))
    assert rows_of(table.lease("g", B, 0, 0.0, rank=0)) == [4]
    assert table.lease("g", C, 0, 0.0, rank=1) is None


def test_shares_that_come_back_are_dealt_again_in_their_order():
    table = table_of(TokenBudget(tokens=4, ranks=1))
    put(table, 1, 4, 4)
    for _ in range(2):
        table.lease("g", B, 0, 0.0)
    table.holder_gone("b", 1)
    assert [rows_of(table.lease("g", C, 0, 0.0)) for _ in range(2)] == [[0], [1]]


def test_a_group_that_lost_a_row_is_whole_without_it_also_after_a_snapshot():
    """Whether the lost row has gone with its memory or not."""
    table = Table(SPEC)
    for row in range(3):
        table.put(A, row + 1, {"tokens": column(f"t{row}", 1)}, (7,), 3)
    table.drop([(1, 2)], "why not")
    table.append(C, 1, [(0, 1)], {"reward": column("r", 1)})
    table = Table.replay(SPEC, decode_events(encode_events(table.snapshot())))
    assert table.lease("train", B, 8, 0.0) is None
    table.append(C, 2, [(2, 3)], {"reward": column("r", 1)})
    dealt = table.lease("train", B, 8, 0.0)
    assert rows_of(dealt) == [0, 2]
    table.ack([dealt.lease_id], B)
    table.put(A, 9, {"tokens": column("u", 1), "reward": column("u", 1)}, (7,), 2)
    assert table.lease("train", B, 8, 0.0) is None, "the key of a group that is over is another group's"


def test_puts_that_overtake_one_another_are_all_taken():
    table = table_of(Fifo())
    assert put(table, 2, 1) == (Put.ACCEPTED, 0)
    assert put(table, 1, 1) == (Put.ACCEPTED, 1)
    assert put(table, 1, 1) == (Put.DUPLICATE, 1)
    for seq in range(3, 300):
        put(table, seq, 1)
    assert put(table, 2, 1)[0] is Put.STALE, "so long ago that nobody knows"


def test_a_new_incarnation_takes_over_although_the_end_of_the_old_one_was_not_told():
    table = table_of(Fifo())
    put(table, 1, 1)
    table.lease("g", B, 1, 0.0)
    assert rows_of(table.lease("g", Holder("b", 2), 1, 0.0)) == [0]
    assert table.lease("g", B, 1, 0.0) is None


def test_rows_are_held_back_where_only_further_ones_help():
    table = table_of(WholeGroups())
    assert not table.is_held_back
    put(table, 1, 1, keys=(7,), group_rows=2)
    assert table.is_held_back
    put(table, 2, 1, keys=(7,), group_rows=2)
    assert not table.is_held_back
    table.lease("g", B, 2, 0.0)
    put(table, 3, 1, keys=(8,), group_rows=2)
    assert not table.is_held_back, "what is lent may come back"
    budget = table_of(TokenBudget(tokens=4, ranks=2))
    put(budget, 1, 4)
    assert budget.is_held_back
    put(budget, 2, 4)
    assert not budget.is_held_back
    first_in = table_of(Fifo())
    put(first_in, 1, 1)
    assert not first_in.is_held_back


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda t: t.put(A, 1, {"other": column("s", 1)}), "no field 'other'"),
        (lambda t: t.put(A, 1, {"tokens": column("s", 1), "reward": column("s", 1, 1)}), "columns of"),
        (lambda t: t.put(A, 1, {"tokens": column("s")}), "columns of"),
        (lambda t: t.put(A, 1, {"tokens": column("s", 1)}, (1, 2), 2), "2 keys"),
        (lambda t: t.append(A, 1, [(0, 2)], {"reward": column("s", 1)}), "another length"),
        (lambda t: t.lease("nobody", B, 1, 0.0), "no consumer group"),
        (lambda t: t.lease("train", B, 1, 0.0, rank=1), "no rank 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, fact):
    with pytest.raises(ValueError, match=fact):
        call(Table(SPEC))


def test_the_first_value_of_a_field_stays():
    table = Table(SPEC)
    put(table, 1, 1, 1, 1)
    table.append(C, 1, [(1, 2)], {"reward": column("r", 1)})
    assert table.append(C, 2, [(1, 2)], {"reward": column("s", 1)}) is Put.DUPLICATE
    assert table.append(C, 3, [(0, 3)], {"reward": column("t", 1, 1, 1)}) is Put.ACCEPTED
    rewards = [part.columns["reward"] for part in table.lease("train", B, 8, 0.0).parts]
    assert [(reward.segment, reward.offset) for reward in rewards] == [("t", 0), ("r", 0), ("t", 8)]


def test_a_row_that_has_only_some_of_the_fields_is_named():
    fields = ("tokens", "reward", "advantage")
    group = ConsumerGroup(name="g", needs=fields)
    table = Table(QueueSpec(fields=fields, groups=(group,)))
    put(table, 1, 1)
    table.append(C, 1, [(0, 1)], {"reward": column("r", 1)})
    with pytest.raises(ValueError, match="row 0 has some"):
        table.append(C, 2, [(0, 1)], {"reward": column("r", 1), "advantage": column("r", 1)})


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"fields": ()}, "fields"),
        ({"fields": ("tokens", "tokens")}, "twice"),
        ({"groups": (ConsumerGroup(name="g", needs=("nothing",)),)}, "nothing"),
        ({"groups": (ConsumerGroup(name="g", needs=("tokens",), lease_s=0),)}, "lease_s"),
        ({"groups": (ConsumerGroup(name="g", needs=("tokens",), sampler=TokenBudget(tokens=0)),)}, "tokens"),
        (
            {"groups": (ConsumerGroup(name="g", needs=("reward",), sampler=TokenBudget(tokens=1)),)},
            "not among needs",
        ),
        ({"fields": tuple(f"f{n}" for n in range(63))}, "at most 62"),
    ],
)
def test_a_spec_is_checked_before_anything_starts(changes, fact):
    fields = {"fields": SPEC.fields, "groups": SPEC.groups, **changes}
    with pytest.raises(ConfigError, match=fact):
        QueueSpec(**fields).check()


def reachable(start):
    """Return the states that some moves lead to."""
    found = {start}
    while more := {after for (state, _), after in TABLE.items() if state in found} - found:
        found |= more
    return found


REACHABLE = {state: reachable(state) for state in RowState}


def test_the_page_prints_the_states_from_the_code():
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "transfer_queue.md").read_text()
    assert f"```mermaid\n{diagram()}\n```" in page


def test_a_row_is_where_the_table_of_states_says():
    table = Table(SPEC)
    found = [table.state_of(0, "train")]
    put(table, 1, 1, keys=(7,), group_rows=1)
    found.append(table.state_of(0, "train"))
    table.append(C, 1, [(0, 1)], {"reward": column("r", 1)})
    found.append(table.state_of(0, "train"))
    dealt = table.lease("train", B, 1, 0.0)
    found.append(table.state_of(0, "train"))
    table.ack([dealt.lease_id], B)
    found.append(table.state_of(0, "train"))
    assert found == [*RowState]


class Play(RuleBasedStateMachine):
    """Producers, consumers, deaths and deadlines in any order, beside a simple account of every row."""

    @initialize(sampler=st.sampled_from([Fifo(), WholeGroups(), TokenBudget(tokens=6, ranks=2)]))
    def begin(self, sampler):
        groups = (
            ConsumerGroup(name="g", needs=("tokens", "reward"), sampler=sampler, lease_s=9.0, max_attempts=4),
            ConsumerGroup(name="h", needs=("tokens",), lease_s=5.0, max_attempts=4),
        )
        self.spec = QueueSpec(fields=("tokens", "reward"), groups=groups)
        self.ranks = getattr(sampler, "ranks", 1)
        self.table, self.events, self.now, self.seq, self.key = Table(self.spec), [], 0.0, 0, 0
        self.incarnation = dict.fromkeys("abc", 1)
        self.held = {}  # lease id -> (group, holder, rows)
        self.acked = {"g": set(), "h": set()}
        self.dropped = {"g": set(), "h": set()}
        self.put_rows, self.rewarded, self.freed = 0, set(), []
        self.states = {}  # (row, group) -> where it was last seen

    def holder(self, name):
        return Holder(name, self.incarnation[name])

    def settle(self):
        """Write down what happened, and look whether the events alone make the same table."""
        self.events += decode_events(encode_events(self.table.take_events()))
        for each_drop in self.table.take_dropped():
            for group in [each_drop.group] if each_drop.group else ["g", "h"]:
                self.dropped[group] |= set(each(each_drop.rows)) - self.acked[group]
        self.freed += self.table.take_freed()

    @rule(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def put(self, lengths):
        self.seq += 1
        self.key += 1
        outcome, first = self.table.put(
            self.holder("a"),
            self.seq,
            {"tokens": column(f"t{self.seq}", *lengths)},
            [self.key] * len(lengths),
            len(lengths),
        )
        assert (outcome, first) == (Put.ACCEPTED, self.put_rows)
        self.put_rows += len(lengths)
        self.settle()

    @rule(data=st.data())
    def reward(self, data):
        waiting = sorted(set(range(self.put_rows)) - self.rewarded - self.dropped["g"])
        if waiting:
            row = data.draw(st.sampled_from(waiting))
            self.seq += 1
            columns = {"reward": column(f"r{self.seq}", 1)}
            put = self.table.append(self.holder("a"), self.seq, [(row, row + 1)], columns)
            assert put is Put.ACCEPTED
            self.rewarded.add(row)
            self.settle()

    @rule(
        name=st.sampled_from("bc"),
        group=st.sampled_from("gh"),
        max_rows=st.integers(1, 5),
        rank=st.integers(0, 1),
    )
    def lease(self, name, group, max_rows, rank):
        rank = rank % self.ranks if group == "g" else 0
        dealt = self.table.lease(group, self.holder(name), max_rows, self.now, rank=rank)
        if dealt is not None:
            rows = set(rows_of(dealt))
            lent = [more for other, _, more in self.held.values() if other == group]
            assert not rows & set().union(*lent, self.acked[group], self.dropped[group]), "a row twice"
            assert group == "h" or rows <= self.rewarded
            self.held[dealt.lease_id] = (group, self.holder(name), rows)
        self.settle()

    @rule(data=st.data())
    def ack(self, data):
        if self.held:
            lease_id = data.draw(st.sampled_from(sorted(self.held)))
            group, holder, rows = self.held.pop(lease_id)
            assert self.table.ack([lease_id], holder) == [Put.ACCEPTED]
            self.acked[group] |= rows - self.dropped[group]
            self.settle()

    @rule(name=st.sampled_from("abc"))
    def die(self, name):
        self.table.holder_gone(name, self.incarnation[name])
        self.held = {key: value for key, value in self.held.items() if value[1] != self.holder(name)}
        self.incarnation[name] += 1
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 4.0, 20.0]))
    def wait(self, seconds):
        self.now += seconds
        for lease_id in self.table.expire(self.now):
            del self.held[lease_id]
        self.settle()

    @rule(data=st.data())
    def drop(self, data):
        if self.put_rows:
            row = data.draw(st.integers(0, self.put_rows - 1))
            self.table.drop([(row, row + 1)], "not wanted")
            self.settle()

    @rule()
    def restart(self):
        self.table = Table.replay(self.spec, self.events)

    @rule()
    def compact(self):
        self.events = decode_events(encode_events(self.table.snapshot()))
        self.table = Table.replay(self.spec, self.events)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "table"):
            return
        for group in "gh":
            progress = self.table.progress(group)
            assert progress["put"] == self.put_rows
            assert progress["acked"] == len(self.acked[group])
            assert progress["dropped"] == len(self.dropped[group])
            assert min(progress.values()) >= 0
        assert len(self.freed) == len(set(self.freed)), "freed twice"

    @invariant()
    def rows_move_as_the_table_of_states_says(self):
        for key in [(row, group) for row in range(getattr(self, "put_rows", 0)) for group in "gh"]:
            before, now = self.states.get(key, RowState.ABSENT), self.table.state_of(*key)
            assert now in REACHABLE[before], (key, before, now)
            self.states[key] = now

    def teardown(self):
        """Whatever happened, all that is left can be dealt and acknowledged."""
        if not hasattr(self, "table"):
            return
        for row in sorted(set(range(self.put_rows)) - self.rewarded - self.dropped["g"]):
            self.seq += 1
            self.table.append(
                self.holder("a"), self.seq, [(row, row + 1)], {"reward": column(f"r{self.seq}", 1)}
            )
        for lease_id, (_, holder, _) in self.held.items():
            self.table.ack([lease_id], holder)
        self.table.end_stream()
        for _ in range(4 * self.put_rows + 8):
            for group in "gh":
                for rank in range(self.ranks if group == "g" else 1):
                    dealt = self.table.lease(group, self.holder("b"), 100, self.now, rank=rank)
                    if dealt is not None:
                        self.table.ack([dealt.lease_id], self.holder("b"))
        assert self.table.is_finished
        assert self.table.segments() == set()


TestPlay = Play.TestCase
TestPlay.settings = settings(
    max_examples=int(os.environ.get("RELAX_ACTOR_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)


def test_events_survive_the_journal():
    event = RowsDropped([(0, 3)], "why", "g")
    assert decode_events(encode_events([event])) == [event]


def test_what_is_needed_is_named_with_the_row_that_it_is_for():
    table = Table(SPEC)
    put(table, 1, 1, 1)
    put(table, 2, 1)
    assert [(int(row), ref.segment) for row, ref in table.holdings()] == [(0, "s1"), (2, "s2")]
    assert (table.resident_rows, table.rows_put_by("a"), table.rows_put_by("b")) == (3, 3, 0)
    assert (table.needs("s1"), table.needs("s3")) == (True, False)


def test_a_stream_ends_once():
    table = table_of(WholeGroups())
    put(table, 1, 1, keys=(7,), group_rows=2)
    table.end_stream()
    table.take_events()
    table.end_stream()
    assert table.take_events() == []
    assert table.is_finished


def test_groups_that_no_row_is_left_of_are_forgotten():
    table = table_of(WholeGroups())
    put(table, 1, 1, 1, keys=(7, 7), group_rows=2)
    table.drop([(0, 2)], "why not")
    put(table, 2, 1, 1, 1, keys=(7, 7, 7), group_rows=3)
    assert rows_of(table.lease("g", B, 9, 0.0)) == [2, 3, 4]


def test_every_event_has_an_effect_of_its_own():
    assert {*TableState(SPEC)._appliers} == {*typing.get_args(Event)}
