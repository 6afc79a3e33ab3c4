"""Rows that travel between hosts, whoever dies on the way; and hosts that are lost and come back."""

import secrets
import time
from collections import Counter
from functools import partial

import pytest
from dying_actors import Lingering, Mortal
from loop_faults import is_active_again
from loop_hosts import loop_hosts
from loop_run import (
    ENDLESS_STEPS,
    assert_trained_in_order,
    assert_trainer_went_on,
    assert_versions_never_go_back,
    kills,
)
from namespaces import make_network, tear_down
from watching import eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.node.lease import LeaseTerms
from relax_actor.outcome import watch
from relax_actor.placement import Seat
from relax_actor.supervision.spec import RestartType
from relax_actor.telemetry import read_events

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

SLOW_TOKENS = {"scripted_token_s": 0.02}
LONG_TERMS = LeaseTerms(ttl_s=10.0, renew_s=0.5, margin_s=0.5)
QUICK_TERMS = LeaseTerms(ttl_s=6.0, renew_s=0.3, margin_s=0.5)


def assert_nothing_was_lost(run, hosts):
    """I2, I3, I5, I7, I8."""
    assert run.outcome.exit_code == (143 if run.config.run.steps == ENDLESS_STEPS else 0), run.log
    assert len(run.trained) == len(set(run.trained)), "a prompt was trained twice"
    assert all(event["balances"] for event in run.of("ledger"))
    staleness = run.config.run.max_staleness
    assert all(int(age) <= staleness for event in run.of("step") for age in event["staleness"])
    assert_versions_never_go_back(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    hosts.assert_nothing_is_left(run)


def test_every_group_is_trained_on_exactly_once_wherever_its_bytes_are_lost(run_loop):
    """The dock, the producer and the queue are killed at every step of a row's way to the queue's host."""
    plan = [
        *kills("dock", "rows_given", ("parcel_written", 2), ("parcel_docked", 2), ("rows_given", 3)),
        *kills("rollout/0", "tensors_written", "parcel_sent", ("parcel_sent", 3), "ready_sent", "leased"),
        *kills("queue", ("queue_decided", 5), ("queue_committed", 7), ("queue_answered", 6)),
    ]
    with loop_hosts(2) as hosts:
        placement = hosts.rollouts_on("b", "b")
        run = run_loop.until_killed(plan, rollout=SLOW_TOKENS, **hosts.settings(placement))
        assert_nothing_was_lost(run, hosts)
    planned = Counter(fault.actor for fault in plan)
    assert planned <= Counter(run.killed), f"{run.killed}\n{run.log}"


def test_partial_rollouts_go_on_on_another_host(run_loop):
    """Chunks travel as well: to the queue's host, and from there to whoever goes on."""
    plan = kills("rollout/0", ("chunk_sent", 4), ("parcel_sent", 2), ("chunk_sent", 4))
    slow = {"scripted_token_s": 0.15}  # the first chunks arrive before the fourth one
    with loop_hosts(3) as hosts:
        run = run_loop.until_killed(
            plan,
            rollout={"chunk_tokens": 2, "max_new_tokens": 12, **slow},
            **hosts.settings(hosts.rollouts_on("b", "c")),
        )
        assert_nothing_was_lost(run, hosts)
    assert run.killed == ["rollout/0"] * 3
    assert run.of("samples_continued")


def test_rewards_may_be_scored_on_another_host(run_loop):
    with loop_hosts(2) as hosts:
        placement = hosts.rollouts_on("a", "b", rewards=("b",))
        plan = kills("reward", ("rewarding", 3), ("reward_sent", 2))
        run = run_loop.until_killed(plan, rollout=SLOW_TOKENS, **hosts.settings(placement))
        assert_nothing_was_lost(run, hosts)
    assert run.killed == ["reward"] * 2


class LoseHost:
    """Kills the node agent of a host once two steps are done.

    Args:
        hosts: which there are.
        name: of the one to lose.
        for_good: whether nothing starts there any more.
    """

    def __init__(self, hosts, name, *, for_good=False):
        self._hosts, self._name, self._for_good = hosts, name, for_good
        self._is_due = True

    def __call__(self, folder):
        steps = [event for event in read_events(folder / "events.jsonl")[0] if event["kind"] == "step"]
        if self._is_due and len(steps) >= 2:
            self._is_due = False
            if self._for_good:
                self._hosts.lose(self._name)
            (agent,) = self._hosts.agents(self._name)
            agent.kill()


def hosts_of(run, actor):
    """Return the hosts that the incarnations of an actor were spawned on."""
    return [event["site"] for event in run.of("child_spawned", child=actor)]


def test_the_prompts_of_a_lost_host_go_on_elsewhere(run_loop):
    """Its replica takes a place on the other host."""
    with loop_hosts(3) as hosts:
        run = run_loop.until(
            partial(is_active_again, "rollout/0"),
            rollout=SLOW_TOKENS,
            on_tick=LoseHost(hosts, "b", for_good=True),
            **hosts.settings(hosts.rollouts_on("b", "c")),
        )
        assert_nothing_was_lost(run, hosts)
    assert set(hosts_of(run, "rollout/0")) == {"b", "c"}


def test_a_replica_without_room_elsewhere_waits_for_its_host_and_is_used_again(run_loop):
    """Degraded meanwhile: one replica of two."""
    with loop_hosts(3) as hosts:
        placement = hosts.rollouts_on("b", "c", gpus=("7",))
        run = run_loop.until(
            partial(is_active_again, "rollout/0"),
            more_steps=0,
            rollout={**SLOW_TOKENS, "min_replicas": 1},
            on_tick=LoseHost(hosts, "b"),
            **hosts.settings(placement),
        )
        assert run.outcome.exit_code == 143, run.log
        assert len(run.trained) == len(set(run.trained))
        assert all(event["balances"] for event in run.of("ledger"))
        assert_trainer_went_on(run)
        hosts.assert_nothing_is_left(run)
    assert set(hosts_of(run, "rollout/0")) == {"b"}
    assert len(hosts_of(run, "rollout/0")) == 2
    assert run.of("child_awaits_host", child="rollout/0")


def test_a_spare_place_is_taken_by_one_replica(run_loop):
    with loop_hosts(4) as hosts:
        spare = Seat(actor="", host="d", gpus=("7",))
        placement = hosts.rollouts_on("b", "c", gpus=("7",), spares=(spare,))
        run = run_loop.until(
            partial(is_active_again, "rollout/0"),
            rollout=SLOW_TOKENS,
            on_tick=LoseHost(hosts, "b", for_good=True),
            **hosts.settings(placement),
        )
        assert_nothing_was_lost(run, hosts)
    assert hosts_of(run, "rollout/0") == ["b", "d"]


def test_below_its_least_replicas_a_run_ends_and_says_why(run_loop):
    with loop_hosts(3) as hosts:
        run = run_loop(
            run={"steps": ENDLESS_STEPS},
            rollout={**SLOW_TOKENS, "min_replicas": 2},
            on_tick=LoseHost(hosts, "b", for_good=True),
            **hosts.settings(hosts.rollouts_on("b", "c", gpus=("7",))),
        )
        hosts.assert_nothing_is_left(run)
    assert run.outcome.exit_code == 4
    assert run.outcome.reason.startswith("1 of 2 rollout replicas have a host, fewer than 2: b: ")


def test_a_run_that_ends_while_an_actor_waits_for_its_host_ends_well(run_loop, tmp_path):
    """Its rollouts are gone a second before those that stop after them."""
    children = (
        ChildSpec(id="store", actor=Mortal, hosts=("b",)),
        ChildSpec(id="lingering", actor=Lingering),
        SupervisorSpec(
            id="rollouts", restart=RestartType.TEMPORARY, children=(ChildSpec(id="rollout", actor=Mortal),)
        ),
    )
    with loop_hosts(2) as hosts:
        places = {"hosts": hosts.hosts, "address": hosts.hosts[0].address}
        with Supervisor(SupervisorSpec(id="run", children=children), run_dir=tmp_path, **places) as tree:
            hosts.lose("b")
            (agent,) = hosts.agents("b")
            agent.kill()
            eventually(lambda: "store" in tree.homeless)
            tree.stop("it has ended")
            outcome = watch(tree, run_loop.config(), None, None)
    assert (outcome.exit_code, outcome.reason) == (0, "it has ended")


class CutLink:
    """Cuts the link of a host when some steps are done, `times` over, each time for a while.

    Args:
        network: whose.
        name: of the host, in the network.
        for_s: how long at least.
        times: how often, each after two further steps.
        until: what has to be among the run's events before the link is there again.
    """

    def __init__(self, network, name, for_s, times=1, until=lambda _events: True):
        self._network, self._name, self._for_s, self._times = network, name, for_s, times
        self._until, self._next_step, self._cut_at, self.healed = until, 2, None, 0

    @property
    def is_over(self):
        """Whether it was cut so often, and is there again."""
        return self.healed == self._times

    def __call__(self, folder):
        events = read_events(folder / "events.jsonl")[0]
        steps, now = sum(event["kind"] == "step" for event in events), time.monotonic()
        if self._cut_at is not None and now >= self._cut_at + self._for_s and self._until(events):
            self._cut_at, self._next_step = None, steps + 2
            self._network.heal(self._name)
            self.healed += 1
        elif self._cut_at is None and not self.is_over and steps >= self._next_step:
            self._network.cut(self._name)
            self._cut_at = time.monotonic()


@pytest.fixture
def network():
    network = make_network(f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}.", 24)
    yield network
    tear_down(network)


def test_rows_on_a_link_that_is_cut_for_a_moment_arrive_once(run_loop, network):
    """Nobody is restarted, and nothing is sampled twice: what did not arrive is sent again."""
    link = CutLink(network, "a", LONG_TERMS.ttl_s / 8, times=3)
    with loop_hosts(3, network) as hosts:
        run = run_loop.until(
            lambda _events: link.is_over,
            rollout={"chunk_tokens": 2, **SLOW_TOKENS},
            on_tick=link,
            **hosts.settings(hosts.rollouts_on("b", "b"), lease=LONG_TERMS),
        )
        assert_nothing_was_lost(run, hosts)
    assert not run.of("host_lost")
    assert len(run.of("child_spawned", child="rollout/0")) == 1


def test_behind_a_link_that_is_cut_for_long_the_prompts_go_on_elsewhere(run_loop, network):
    """Its actors end by themselves before others take over, so that no sample has two owners."""

    def is_lost(events):
        return any(event["kind"] == "host_lost" for event in events)

    link = CutLink(network, "a", 1.5 * QUICK_TERMS.ttl_s, until=is_lost)
    with loop_hosts(3, network) as hosts:
        run = run_loop.until(
            lambda events: link.is_over and is_active_again("rollout/0", events),
            rollout=SLOW_TOKENS,
            on_tick=link,
            **hosts.settings(hosts.rollouts_on("b", "c", gpus=("7",)), lease=QUICK_TERMS),
        )
        assert_nothing_was_lost(run, hosts)
    assert {event["host"] for event in run.of("host_lost")} == {"b"}
