"""`relax-actor launch` over hosts behind a real sshd: a whole run, and every way to end one."""

import math
import os
import signal
import time

import pytest
from ssh_hosts import await_nothing, own_shm
from ssh_launch import listened_at, listening
from watching import eventually

STEPS = 40
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="session")
def hosts(servers):
    """Four servers, each with shared memory of its own where that can be had."""
    return [servers.start(before=own_shm()) for _ in range(4)]


@pytest.mark.parametrize("count", [2, 4])
def test_a_model_learns_over_several_hosts_and_the_head_alone_tells_of_it(start, hosts, count):
    launched = start(
        hosts[:count],
        *("-x", "SECRET=it's a $ecret"),
        steps=STEPS,
        rollout={"engine": "transformers", "replicas": count},
    )
    family, ports = await_every_host(launched, hosts[:count])
    launched.await_event("child_ready", child=f"rollout/{count - 1}")
    shown = [launched.seen(*words) for words in (("ps",), ("status",))]
    assert launched.ended() == 0, launched.output()
    await_nothing(launched.run_id, family)
    assert not ports & listened_at()
    assert [event["step"] for event in launched.steps] == list(range(1, STEPS + 1))
    assert all(math.isfinite(event["reward_mean"]) for event in launched.steps)
    ledgers = launched.events("ledger")
    assert ledgers
    assert all(event["balances"] for event in ledgers)  # I2
    homes = {event["child"]: event["site"] for event in launched.events("child_spawned")}
    assert len({homes[f"rollout/{index}"] for index in range(count)}) == count
    assert f"rollout/{count - 1}" in shown[0]
    sampled = {event["actor"] for event in launched.events("policy_installed")}
    assert sampled >= {f"rollout/{index}" for index in range(count)}
    assert "rollout/0" in launched.seen("logs", "rollout") or (launched.folder / "logs").is_dir()


def test_rollouts_over_ssh_are_killed_and_scaled_from_the_head(start, hosts):
    launched = start(hosts[:2], "--preflight", "full", steps=5000, rollout={"replicas": 2})
    launched.await_event("step", step=2)
    assert launched.output().startswith("preflight of 2 hosts, ")
    assert launched.seen("kill", "rollout/1").startswith("killed rollout/1#1")
    launched.await_event("child_active", child="rollout/1", incarnation=2)
    assert launched.seen("scale", "4").splitlines()[-1] == "4 rollouts"
    launched.await_event("child_active", child="rollout/3")
    homes = [event["site"] for event in launched.events("child_spawned") if "rollout" in event["child"]]
    assert len(set(homes)) == 2
    assert "rollout/3" in launched.seen("ps")
    assert launched.seen("scale", "1").splitlines()[-1] == "1 rollouts"
    assert "rollout/3" not in launched.seen("tree")
    family = launched.family(hosts)
    launched.seen("stop")
    assert launched.ended() == 143, launched.output()
    await_nothing(launched.run_id, family)
    left = [
        event for event in launched.events("child_exited") if event["child"] in {"rollout/2", "rollout/3"}
    ]
    assert {event["exit"] for event in left} <= {"stopped", "normal"}


def await_every_host(launched, hosts):
    """Return the processes of a run and where they listen, once that is at the addresses of all hosts."""
    family, ports = [], set()
    sshds = {(host.address, host.port) for host in hosts}  # a session that begins still has their sockets

    def is_everywhere():
        assert launched.process.poll() is None, launched.output()
        family[:] = launched.family(hosts)
        ports.clear()
        ports.update(listening(family) - sshds)
        return {host.address for host in hosts} <= {address for address, _ in ports}

    eventually(is_everywhere, 120)
    return family, ports


@pytest.mark.parametrize("moment", ["at_start", "loading", "in_step"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_nothing(start, hosts, moment, times):
    hosts = hosts[: 2 if moment == "in_step" else 1]  # what is cut short does not depend on their number
    launched = start(hosts, steps=5000)
    events = launched.folder / "events.jsonl"
    if moment == "at_start":
        eventually(lambda: events.exists() and launched.events("run_started"))
    elif moment == "loading":
        launched.await_event("child_spawned", child="trainer")
    else:
        launched.await_event("step", step=2)
    family = launched.family(hosts)
    for _ in range(times):
        os.kill(launched.process.pid, signal.SIGINT)
        time.sleep(0.3)  # two signals at one moment are one
    assert launched.ended() == 130, launched.output()
    await_nothing(launched.run_id, family)


def test_a_killed_launcher_leaves_nothing_on_any_host(start, hosts):
    launched = start(hosts[:2], steps=5000)
    launched.await_event("step", step=1)
    family = launched.family(hosts)
    launched.process.kill()
    await_nothing(launched.run_id, family)


def test_a_host_that_cannot_be_reached_is_found_before_anything_starts(start, servers, hosts):
    gone = servers.start()
    gone.stop()
    launched = start([hosts[0], gone])
    assert launched.ended() == 3
    text = launched.output()
    assert f"FAIL  ssh            {gone.address}: nobody listens at its ssh port" in text
    assert "hint: start sshd there" in text
    assert not launched.folder.exists()


def test_a_host_that_is_lost_before_it_joins_is_told_with_its_cause_and_code_3(start, servers, hosts):
    """Without a preflight, as it may happen after one."""
    gone = servers.start()
    gone.stop()
    launched = start([hosts[0], gone], "--preflight", "off")
    assert launched.ended() == 3
    text = launched.output()
    assert f"error: {gone.address}: nobody listens at its ssh port" in text
    assert "hint: start sshd there" in text
    await_nothing(launched.run_id, [])
