"""A whole run whose replica is a real SGLang server over two hosts: one half after the other dies."""

import pytest
from loop_hosts import loop_hosts
from namespaces import some_network
from spread_replicas import Strikes, assert_nothing_was_lost, over

pytestmark = [pytest.mark.sglang, pytest.mark.fault, pytest.mark.timeout(600)]

DEADLINE_S = 300.0


@pytest.fixture
def rollout(sglang_python):
    """Return the settings of one replica over two hosts."""
    return {
        "engine": "sglang",
        "replicas": 1,
        "tensor_parallel": 2,
        "hosts_per_replica": 2,
        "max_new_tokens": 32,
        "sglang_python": sglang_python,
    }


def test_a_replica_over_two_hosts_starts_again_whole_and_loses_no_sample(run_loop, rollout):
    """I2, I3, I4, I5, I7, I8: a rank on the other host is killed, the part there, the half on its own."""
    strikes = Strikes("far scheduler", "part", "near")
    with loop_hosts(2) as hosts:
        run = run_loop.until(
            strikes.are_over,
            more_steps=1,
            rollout=rollout,
            on_tick=strikes,
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=a", "part/0=b")),
        )
        assert_nothing_was_lost(run, hosts)

    assert strikes.waiting == []
    assert {event["route"] for event in run.of("engine_updated")} == {"group"}
    assert {event["tp"] for event in run.of("engine_started")} == {2}
    assert len(run.of("engine_started")) == 4


def test_the_nodes_of_a_server_meet_over_a_network(run_loop, rollout):
    """Each has an address and memory of its own, as SGLang looks at both to find out who is where.

    Both look for stop strings, for which both need the tokenizer.
    """
    with some_network() as network, loop_hosts(3, network, own_shm=True) as hosts:
        run = run_loop(
            rollout=rollout | {"stop": ("ab", "xyz")},
            run={"steps": 2},
            deadline_s=DEADLINE_S,
            **hosts.settings(over(hosts, "rollout/0=b", "part/0=c")),
        )
        assert_nothing_was_lost(run, hosts)

    assert len(run.of("part_started")) == 1
