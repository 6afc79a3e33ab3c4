"""Prompts are shared fairly among replicas that ask, and nobody waits for one that does not."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from queue_rows import prompt, ref, sample_of

from relax_actor.ids import Holder
from relax_actor.protocol import Purpose
from relax_actor.roles.leasing import Leasing
from relax_actor.transfer_queue.askers import HOLD_S, INSTALL_HOLD_S
from relax_actor.transfer_queue.ledger import Ledger, LedgerConfig
from relax_actor.transfer_queue.records import Put

SAMPLES = 8
CONFIG = LedgerConfig(
    groups_per_batch=64,
    samples_per_prompt=SAMPLES,
    max_staleness=1,
    total_groups=640,
    min_valid_samples=1,
    max_attempts=9,
    prompt_lease_s=900.0,
    reward_lease_s=900.0,
    batch_lease_s=900.0,
    group_deadline_s=9000.0,
)


class Replica:
    """A rollout that asks, is answered, and puts samples."""

    def __init__(self, desk, name, room):
        self.desk, self.holder, self.room = desk, Holder(name, 1), room
        self.version, self.leases, self.request, self.asker = 0, {}, None, None
        self.given = 0  # samples

    @property
    def name(self):
        return self.holder.name

    @property
    def load(self):
        return len(self.leases)

    @property
    def groups(self):
        return {group_id for group_id, _ in self.leases}

    def ask(self):
        assert self.request is None
        self.request = self.desk.leasing.asking(self.holder, self.version, self.room - self.load)
        self.asker = self.request.__enter__()
        return self.look()

    def ask_on(self):
        """Ask as long as there is room and an answer."""
        while self.request is None and self.load < self.room:
            self.ask()

    def look(self):
        """Let the queue look for what this one waits for; return whether it was answered."""
        answer = self.request and self.desk.leasing.leased(self.asker, self.desk.version)
        if not answer:
            return False
        self.hang_up()
        for lease in answer.prompts:
            self.leases |= {(lease.group.group_id, index): lease for index in lease.missing}
            self.given += len(lease.missing)
        self.version = answer.policy_version if not answer.prompts else self.version
        return True

    def hang_up(self):
        request, self.request = self.request, None
        request.__exit__(None, None, None)

    def put(self, keys=None):
        samples = []
        for key in list(self.leases) if keys is None else keys:
            tensor, lease = ref(f"s{key}"), self.leases.pop(key)
            samples.append(sample_of(lease, key[1], tensor))
        outcomes = self.desk.ledger.put_samples(samples, self.holder, self.desk.now)
        assert outcomes == [Put.ACCEPTED] * len(samples)
        self.desk.leasing.put(self.holder, len(samples))

    def dies(self):
        self.desk.ledger.holder_gone(self.name, 1, self.desk.now)
        self.desk.leasing.gone(self.name, 1)
        self.leases.clear()


class Desk:
    """A queue's leasing, its clock and its replicas."""

    def __init__(self, rooms):
        self.now, self.version, self.woken = 100.0, 0, 0
        self.ledger = Ledger(CONFIG)
        self.ledger.published(0, self.now)
        self.leasing = Leasing(self.ledger, lambda: self.now, self.wake)
        self.replicas = [Replica(self, f"rollout/{index}", room) for index, room in enumerate(rooms)]
        self.evals = itertools.count(1)

    def wake(self):
        self.woken += 1

    def submit(self, groups, samples=SAMPLES, purpose=Purpose.TRAIN):
        for _ in range(groups):
            is_train = purpose is Purpose.TRAIN
            group_id = self.ledger.next_group() if is_train else -next(self.evals)
            group = prompt(group_id, ref(f"p{group_id}"), samples, purpose=purpose)
            assert self.ledger.submit(group, self.now)

    def notify(self):
        """Look for everybody that waits, in the order they came; those who were answered ask again."""
        while answered := [each for each in self.replicas if each.look()]:
            for each in answered:
                each.ask_on()

    def publish(self):
        self.version += 1
        self.ledger.published(self.version, self.now)

    def pass_time(self, seconds):
        self.now += seconds
        if self.leasing.is_time(self.now):
            self.notify()

    @property
    def loads(self):
        return [each.load for each in self.replicas]


def test_the_first_to_ask_does_not_take_the_work_of_all():
    """Three replicas with room for 256 samples, and a batch of 96."""
    desk = Desk([256] * 3)
    for each in desk.replicas:
        each.ask()
    desk.submit(12)
    desk.notify()
    assert desk.loads == [32, 32, 32]
    assert all(len(each.groups) == 4 for each in desk.replicas), "whole groups"


def test_evaluations_are_shared_like_everything_else():
    desk = Desk([256] * 3)
    for each in desk.replicas:
        each.ask()
    desk.submit(9, samples=4, purpose=Purpose.EVAL)
    desk.notify()
    assert desk.loads == [12, 12, 12]


def test_the_least_loaded_gets_what_is_new():
    desk = Desk([256] * 3)
    a, b, c = desk.replicas
    desk.submit(8)
    a.ask()  # nobody else has asked yet
    assert desk.loads == [64, 0, 0]
    for each in (a, b, c):
        each.ask()
    desk.submit(9)
    desk.notify()
    assert desk.loads == [64, 40, 32]


def test_nobody_waits_for_replicas_that_have_never_asked():
    desk = Desk([256] * 3)
    desk.submit(12)
    assert desk.replicas[0].ask()
    assert desk.loads == [96, 0, 0]
    assert desk.leasing.look_again_s is None


def test_who_was_answered_just_now_has_its_share_kept_for_milliseconds_and_not_longer():
    desk = Desk([256] * 2)
    a, b = desk.replicas
    for each in (a, b):
        each.ask()
    desk.submit(2)
    assert a.look()
    assert b.look()  # neither has asked again
    desk.submit(4)
    a.ask()
    assert desk.loads == [24, 8], "its share at once"
    a.ask()
    assert not a.look()
    assert desk.woken > 0
    assert desk.leasing.look_again_s <= desk.now + HOLD_S
    desk.pass_time(HOLD_S)
    assert desk.loads == [40, 8], "the other has not come back: nothing waits for it any more"
    assert not desk.ledger.has_prompts


def test_who_comes_back_in_time_gets_what_was_kept_for_it():
    desk = Desk([256] * 2)
    a, b = desk.replicas
    for each in (a, b):
        each.ask()
    desk.submit(2)
    assert a.look()
    assert b.look()
    desk.submit(4)
    a.ask()
    desk.pass_time(HOLD_S / 2)
    b.ask()
    assert desk.loads == [24, 24]


def test_a_dead_replica_is_not_waited_for_and_its_work_goes_to_the_others_evenly():
    desk = Desk([256] * 3)
    for each in desk.replicas:
        each.ask()
    desk.submit(12)
    desk.notify()
    desk.replicas[2].dies()
    desk.notify()
    assert desk.loads == [48, 48, 0]
    assert not desk.ledger.has_prompts


def test_a_replica_that_leaves_is_not_waited_for():
    """It has cancelled its request, and finishes what it has."""
    desk = Desk([256] * 2)
    a, b = desk.replicas
    for each in (a, b):
        each.ask()
    desk.submit(4)
    desk.notify()
    b.hang_up()
    b.put()  # least loaded now
    desk.submit(4)
    desk.notify()
    assert desk.loads == [48, 0]


def test_a_replica_that_puts_and_does_not_ask_holds_work_back_once():
    """It is leaving, or hangs: each of its puts might be the one before it asks again."""
    desk = Desk([256] * 2)
    a, b = desk.replicas
    desk.submit(1)
    a.ask()
    b.ask()
    desk.pass_time(HOLD_S)
    a.put(list(a.leases)[:1])
    desk.submit(2)
    desk.notify()
    assert b.load == 8, "the other group is kept for who has put"
    desk.pass_time(HOLD_S / 2)
    a.put(list(a.leases)[:1])
    desk.pass_time(HOLD_S / 2)
    assert b.load == 16, "and was not kept anew"


def test_a_version_that_others_install_is_waited_for_as_long_as_the_first_has_needed():
    desk = Desk([256] * 3)
    a, b, _ = desk.replicas
    for each in desk.replicas:
        each.ask()
    desk.publish()
    desk.submit(12)
    for each in desk.replicas:
        assert each.look(), "told of the newer version"
    desk.pass_time(0.1)
    a.ask()
    assert a.load == 32, "its share at once"
    a.ask()
    desk.pass_time(0.09)
    b.ask()
    assert b.load == 32
    b.ask()
    desk.pass_time(0.011)
    assert sum(desk.loads) == 96, "the third is slow: nobody waits for it"
    assert desk.loads[2] == 0


def test_an_install_that_takes_long_is_not_waited_for_as_long():
    desk = Desk([256] * 2)
    a, b = desk.replicas
    for each in (a, b):
        each.ask()
    desk.publish()
    desk.submit(2)
    assert a.look()
    assert b.look()
    desk.pass_time(9.0)
    a.ask()
    a.ask()
    assert a.load == 8
    assert desk.leasing.look_again_s == desk.now + INSTALL_HOLD_S
    desk.pass_time(INSTALL_HOLD_S)
    assert a.load == 16


@pytest.mark.parametrize("version", [0, 2])
def test_who_has_another_version_has_no_share(version):
    """One that is behind cannot sample, nor one that has installed what the queue was not told of yet."""
    desk = Desk([256] * 2)
    a, b = desk.replicas
    desk.publish()
    a.version, b.version = 1, version
    b.ask()
    desk.submit(4)
    a.ask()
    assert a.load == 32


def test_where_there_is_plenty_everybody_is_filled_up():
    desk = Desk([16, 16, 16])
    for each in desk.replicas:
        each.ask()
    desk.submit(64)
    desk.notify()
    assert desk.loads == [16, 16, 16]


def test_what_is_left_of_a_prompt_goes_to_the_replica_that_has_its_prefix():
    """It had room for half a group; the other has less to do and asks first."""
    desk = Desk([4, 64])
    a, b = desk.replicas
    desk.submit(1)
    a.ask()
    b.ask()
    assert desk.loads == [4, 0]
    a.put()  # all at once: nobody has the group now
    b.look()
    assert b.load == 0
    a.ask()
    assert a.given == 8


def test_what_is_left_of_a_prompt_goes_to_anybody_when_its_replica_does_not_ask():
    desk = Desk([4, 64])
    a, b = desk.replicas
    desk.submit(1)
    a.ask()
    b.ask()
    a.put()
    b.look()
    desk.pass_time(HOLD_S)
    assert desk.loads == [0, 4]


@pytest.mark.parametrize("how", ["died", "old version"])
def test_a_prefix_that_is_gone_is_not_waited_for(how):
    desk = Desk([4, 64])
    a, b = desk.replicas
    desk.submit(1)
    a.ask()
    if how == "died":
        a.dies()
    else:
        a.put()
        desk.publish()
        b.version = 1
    b.ask()
    assert b.load == (8 if how == "died" else 4)


@settings(deadline=None)
@given(
    rooms=st.lists(st.integers(1, 80), min_size=1, max_size=5) | st.integers(1, 5).map(lambda n: [999] * n),
    moves=st.lists(st.tuples(st.sampled_from(["submit", "put", "tick"]), st.integers(0, 9)), max_size=30),
)
def test_no_replica_stands_idle_beside_work_and_none_is_a_group_ahead_of_another(rooms, moves):
    """Whatever comes and goes; all of them ask whenever they have room."""
    desk = Desk(rooms)
    for each in desk.replicas:
        each.ask()
    for move, number in moves:
        before = {each.name: each.load for each in desk.replicas}
        if move == "submit":
            desk.submit(min(number, desk.ledger.room()))
        elif move == "put":
            each = desk.replicas[number % len(rooms)]
            each.put(list(each.leases)[: number + 1])
            before[each.name] = each.load
            each.ask_on()
        desk.notify()
        if move == "tick":
            desk.pass_time(HOLD_S)
        with_room = [each for each in desk.replicas if each.load < each.room]
        assert not (with_room and desk.ledger.has_prompts), "work waits beside room"
        for each, other in itertools.permutations(with_room, 2):
            took = each.load > before[each.name]
            is_split = max(rooms) < 999  # a group that does not fit is on its way
            assert is_split or not took or each.load - other.load <= SAMPLES, "given to one that had more"


def test_a_batch_that_comes_in_parts_is_shared_as_if_it_came_at_once():
    desk = Desk([256] * 3)
    for each in desk.replicas:
        each.ask()
    for _ in range(12):
        desk.submit(1)
        desk.notify()
    assert desk.loads == [32, 32, 32]
