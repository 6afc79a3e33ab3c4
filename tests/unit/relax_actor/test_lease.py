"""Leases and run epochs: who is alive at time t, whatever the network and the clocks do."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actor.node.lease import Grants, HeldLease, LeaseTerms
from relax_actor.supervision.epoch import current_epoch, next_epoch

TERMS = LeaseTerms(ttl_s=10.0, renew_s=2.0, drift_frac=0.1, margin_s=1.0)


def test_the_head_waits_longer_than_the_lease_lasts_on_a_clock_that_drifts():
    assert TERMS.patience_s == pytest.approx(12.0)


def test_a_lease_lasts_from_the_moment_it_was_asked_for():
    lease = HeldLease(TERMS, until_s=120.0)
    number = lease.ask(100.0)
    assert lease.granted(number, 103.0)
    assert lease.until_s == 110.0
    assert not lease.is_over(109.9)
    assert lease.is_over(110.0)


def test_before_the_first_grant_the_patience_of_the_start_counts():
    lease = HeldLease(TERMS, until_s=120.0)
    assert not lease.is_granted
    assert not lease.is_over(119.0)
    assert lease.granted(lease.ask(1.0), 1.5)
    assert lease.is_granted
    assert lease.until_s == 11.0


def test_a_lease_that_is_over_stays_over():
    lease = HeldLease(TERMS, until_s=5.0)
    number = lease.ask(4.0)
    assert not lease.granted(number, 5.0)
    assert lease.is_over(5.0)


def test_an_older_grant_that_comes_late_takes_nothing_back():
    lease = HeldLease(TERMS, until_s=100.0)
    first, second = lease.ask(0.0), lease.ask(2.0)
    assert lease.granted(second, 3.0)
    assert not lease.granted(first, 3.5)
    assert not lease.granted(99, 3.5)
    assert lease.until_s == 12.0


def test_a_host_is_lost_once_after_the_heads_patience():
    grants = Grants(TERMS, 0.0)
    grants.grant("a", 0.0)
    grants.grant("b", 0.0)
    for now_s in (2.0, 4.0, 6.0, 8.0, 10.0):
        grants.grant("b", now_s)
        assert grants.expired(now_s) == []
    assert grants.alive == {"a", "b"}
    assert grants.expired(12.0) == ["a"]
    assert grants.expired(13.0) == []
    assert grants.alive == {"b"}


def test_a_host_that_is_known_to_be_gone_is_not_lost_again():
    grants = Grants(TERMS, 0.0)
    grants.grant("a", 0.0)
    grants.withdraw("a")
    grants.withdraw("never there")
    assert grants.expired(2.0) == []
    assert grants.alive == frozenset()


def test_the_heads_own_pause_counts_against_nobody():
    grants = Grants(TERMS, 0.0)
    grants.grant("a", 0.0)
    assert grants.expired(60.0) == []  # the head was stopped for a minute and heard nobody
    assert grants.expired(62.0) == []
    for now_s in (64.0, 66.0, 68.0):
        assert grants.expired(now_s) == []
    assert grants.expired(70.0) == ["a"]


class World:
    """One agent and the head in real time, which neither of them sees: the model.

    Each reads a clock of its own, that has its own start and runs a little fast or slow.
    """

    def __init__(self, offset_s: float, rate: float) -> None:
        self.now_s, self.offset_s, self.rate = 0.0, offset_s, rate
        self.held = HeldLease(TERMS, self.agent_s + 120.0)
        self.grants = Grants(TERMS, 0.0)
        self.on_the_way: list[int] = []  # requests
        self.coming_back: list[int] = []  # grants
        self.is_fenced = self.is_lost = False

    @property
    def agent_s(self) -> float:
        return self.offset_s + self.now_s * self.rate

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.is_fenced = self.is_fenced or self.held.is_over(self.agent_s)

    def ask(self) -> None:
        if not self.is_fenced:
            self.on_the_way.append(self.held.ask(self.agent_s))

    def deliver_request(self, index: int) -> None:
        if self.on_the_way and not self.is_lost:  # one who was given up is refused
            number = self.on_the_way.pop(index % len(self.on_the_way))
            self.grants.grant("a", self.now_s)
            self.coming_back.append(number)

    def deliver_grant(self, index: int) -> None:
        if self.coming_back and not self.is_fenced:
            self.held.granted(self.coming_back.pop(index % len(self.coming_back)), self.agent_s)

    def look(self) -> None:
        self.is_lost = self.is_lost or self.grants.expired(self.now_s) == ["a"]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass_time"), st.floats(0.01, 6.0)),
        st.tuples(st.just("ask")),
        st.tuples(st.just("deliver_request"), st.integers(0, 5)),
        st.tuples(st.just("deliver_grant"), st.integers(0, 5)),
        st.tuples(st.just("look")),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, offset_s=st.floats(-1e6, 1e6), rate=st.floats(0.91, 1.09))
def test_a_host_is_never_given_up_while_its_lease_holds(steps, offset_s, rate):
    """Messages late, lost and overtaken, both sides paused, clocks apart and drifting: never two at once."""
    world = World(offset_s, rate)
    world.ask()
    world.deliver_request(0)
    world.deliver_grant(0)  # an agent is given actors after its first grant only
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
        world.pass_time(0.0)
        if world.is_lost:
            assert world.is_fenced


@settings(max_examples=50, deadline=None)
@given(delay_s=st.floats(0.0, 3.0), offset_s=st.floats(-1e6, 1e6), rate=st.floats(0.91, 1.09))
def test_a_slow_but_working_link_loses_nobody(delay_s, offset_s, rate):
    world = World(offset_s, rate)
    for _ in range(50):
        world.ask()
        world.pass_time(delay_s / 2 + 0.01)
        world.deliver_request(0)
        world.look()
        world.pass_time(delay_s / 2 + 0.01)
        world.deliver_grant(0)
        world.look()
        world.pass_time(TERMS.renew_s)
        world.look()
    assert not world.is_fenced
    assert not world.is_lost


@settings(max_examples=50, deadline=None)
@given(offset_s=st.floats(-1e6, 1e6), rate=st.floats(0.91, 1.09))
def test_silence_is_noticed_within_the_heads_patience(offset_s, rate):
    world = World(offset_s, rate)
    world.ask()
    world.deliver_request(0)
    world.deliver_grant(0)
    while not world.is_lost:
        world.pass_time(TERMS.renew_s / 2)
        world.look()
    assert world.is_fenced
    assert world.now_s <= TERMS.patience_s + TERMS.renew_s


def test_each_start_of_a_head_has_the_next_epoch(tmp_path):
    assert current_epoch(tmp_path) == 0
    assert [next_epoch(tmp_path) for _ in range(3)] == [1, 2, 3]
    assert current_epoch(tmp_path) == 3


def test_heads_that_start_at_the_same_moment_get_different_epochs(tmp_path):
    epochs = []
    threads = [threading.Thread(target=lambda: epochs.append(next_epoch(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(epochs) == list(range(1, 9))
