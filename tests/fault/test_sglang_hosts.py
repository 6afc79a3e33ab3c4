"""A replica over two hosts, whichever half of it dies: it starts again whole, and nothing is lost."""

import json

import fake_sglang
import pytest
from loop_hosts import loop_hosts
from loop_run import assert_trainer_went_on
from namespaces import some_network
from spread_replicas import Strikes, assert_nothing_was_lost, over, survivors

from relax_actor.faults import Action, Fault

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

DEADLINE_S = 200.0


@pytest.fixture
def rollout(tmp_path):
    """Return the rollout's settings: servers of two nodes that do as they are told."""

    def settings(*, replicas=1, **script):
        script = {"token_s": 0.005, "kv_tokens": 4096} | script
        return {
            "engine": "sglang",
            "replicas": replicas,
            "tensor_parallel": 2,
            "hosts_per_replica": 2,
            "sglang_python": str(fake_sglang.stand_in(tmp_path)),
            "sglang_env": {"FAKE_SGLANG": json.dumps(script)},
        }

    return settings


def test_a_replica_over_two_hosts_samples_and_leaves_nothing(run_loop, rollout):
    with loop_hosts(2) as hosts:
        run = run_loop(rollout=rollout(), **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")))
        assert_nothing_was_lost(run, hosts)
    assert {event["route"] for event in run.of("engine_updated")} == {"group"}
    (part,), (engine,) = run.of("part_started"), run.of("engine_started")
    assert (part["actor"], part["rollout"], part["incarnation"], part["node"]) == (
        "part/0",
        "rollout/0",
        1,
        1,
    )
    assert engine["tp"] == 2
    assert not run.killed
    assert not run.of("child_restarting")
    assert list((run.folder / "crash").iterdir()) == []


def test_a_replica_starts_again_whole_whichever_of_its_processes_dies(run_loop, rollout):
    """The server's half on the other host, the part, the half on its own host, the rollout; each once."""
    strikes = Strikes("far", "part", "near", "rollout")
    dies = Fault(
        actor="part/0", point="part_asked", incarnation=3
    )  # without a server yet, when it is asked for one
    with loop_hosts(2) as hosts:
        run = run_loop.until(
            strikes.are_over,
            plan=[dies],
            rollout=rollout(token_s=0.01),
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=b", "part/0=a")),
        )
        assert_nothing_was_lost(run, hosts)
    assert strikes.waiting == []
    whole = [event["incarnation"] for event in run.of("part_started")]
    assert len(run.of("engine_started")) >= 5, run.log
    assert {event["inc"] for event in run.of("engine_started")} <= set(whole)
    parts = [event["inc"] for event in run.of("part_started")]
    assert len(parts) == len(set(parts)), "a part served twice"
    assert 3 not in parts


def test_a_part_that_is_stopped_does_not_hold_up_its_replica(run_loop, rollout):
    """Once before it answers, and once after its server has come up, when the next one has to start."""
    strikes = Strikes("far", "stopped part")
    hangs = Fault(actor="part/0", point="part_asked", action=Action.STOP, incarnation=2)
    with loop_hosts(2) as hosts:
        run = run_loop.until(
            strikes.are_over,
            plan=[hangs],
            rollout=rollout(token_s=0.01),
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")),
        )
        assert_nothing_was_lost(run, hosts)
    assert strikes.waiting == []
    assert "no part/0, which did not start its server" in json.dumps(
        run.of("child_exited", child="rollout/0")
    )


def test_the_other_replicas_go_on(run_loop, rollout):
    strikes = Strikes("far", "part")
    with loop_hosts(2) as hosts:
        seats = ("rollout/0=a", "part/0=b", "rollout/1=b", "part/1=a")
        run = run_loop.until(
            lambda _events: not strikes.waiting,
            rollout=rollout(replicas=2, token_s=0.02),
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, *seats)),
        )
        assert_nothing_was_lost(run, hosts, is_back=False)
    assert strikes.waiting == []
    assert (
        len(run.of("child_spawned", child="rollout/1")) == len(run.of("child_spawned", child="part/1")) == 1
    )


def test_a_replica_waits_for_the_lost_host_of_its_part_while_others_go_on(run_loop, rollout):
    strikes = Strikes("host")
    with loop_hosts(3) as hosts:
        placement = over(hosts, "rollout/0=a", "part/0=b", "rollout/1=c", "part/1=a")
        run = run_loop.until(
            strikes.are_over,
            more_steps=0,
            rollout=rollout(replicas=2, token_s=0.02),
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(placement),
        )
        assert run.outcome.exit_code == 143, run.log
        assert len(run.trained) == len(set(run.trained))
        assert all(event["balances"] for event in run.of("ledger"))
        assert_trainer_went_on(run)
        hosts.assert_nothing_is_left(run)
    assert strikes.waiting == []
    assert [event["host"] for event in run.of("host_lost")] == ["b"]
    assert len(run.of("child_spawned", child="rollout/1")) == 1
    assert survivors(run) == []


def test_the_nodes_of_a_replica_meet_over_a_network(run_loop, rollout):
    with some_network() as network, loop_hosts(3, network) as hosts:
        run = run_loop(
            rollout=rollout(),
            run={"steps": 3},
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=b", "part/0=c")),
        )
        assert_nothing_was_lost(run, hosts)
    assert len(run.of("part_started")) == 1


def test_a_part_whose_server_does_not_start_is_named_with_its_last_word(run_loop, rollout):
    with loop_hosts(2) as hosts:
        run = run_loop(
            rollout=rollout(die_at_start=True, far_dies=True),
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")),
        )
        assert run.outcome.exit_code == 1
        hosts.assert_nothing_is_left(run)
    assert "linked to `part/0`, which failed" in run.outcome.reason
    assert "node 1 ended with exit code 3; its last word: ValueError: no such model" in run.outcome.reason
