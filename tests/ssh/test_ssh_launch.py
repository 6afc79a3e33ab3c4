"""`relax-actor launch` over hosts behind a real sshd: a whole run, and every way to end one."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from loop_run import SUPPORT, loop_config
from ssh_hosts import await_nothing, family_of
from watching import eventually

from launcher.toml import to_toml
from relax_actor.telemetry import read_events

pytestmark = pytest.mark.timeout(150)

OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


@dataclass
class Launched:
    """A launch that goes on, or is over."""

    process: subprocess.Popen[str]
    folder: Path

    def events(self, kind):
        return [event for event in read_events(self.folder / "events.jsonl")[0] if event["kind"] == kind]

    def await_event(self, kind, timeout_s=60.0, **fields):
        def is_there():
            assert self.process.poll() is None, self.output()
            return any(fields.items() <= event.items() for event in self.events(kind))

        eventually(is_there, timeout_s)

    def output(self):
        return (self.folder.parent / "out").read_text()

    def ended(self, timeout_s=90.0):
        return self.process.wait(timeout_s)

    @property
    def run_id(self):
        return self.events("tree_started")[-1]["run_id"]

    def family(self, servers):
        mine = [each for server in servers for each in server.sessions]
        return [*family_of(psutil.Process(self.process.pid)), *mine]


@pytest.fixture(scope="session")
def hosts(servers):
    """Four servers, each with shared memory of its own where that can be had."""
    done = subprocess.run([*OWN_SHM, "true"], capture_output=True, check=False)
    apart = OWN_SHM if done.returncode == 0 else ()
    return [servers.start(before=apart) for _ in range(4)]


@pytest.fixture
def start(servers, python, tiny_model, tmp_path):
    """Return what starts a launch over servers."""
    started = []

    def start(which, *words, steps=5, replicas=2):
        run = {"steps": steps, "grace_s": 20.0, "max_staleness": 1, "user_path": str(SUPPORT)}
        rollout = {"replicas": replicas, "device": "cpu"}
        config = loop_config(tiny_model, run=run, rollout=rollout, train={"device": "cpu"})
        file = tmp_path / "run.toml"
        file.write_text(to_toml(config))
        lines = [f"{server.address} slots=2 port={server.port}\n" for server in which]
        (tmp_path / "hostfile").write_text("".join(lines))
        options = [f"--ssh-opt={option}" for option in servers.options().options]
        command = [
            *(sys.executable, "-m", "relax_actor", "launch", str(file)),
            *("-H", str(tmp_path / "hostfile"), "--identity", str(servers.key), *options),
            *("--remote-python", str(python), "--run-dir", str(tmp_path / "run"), "--plain", *words),
        ]
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, text=True, start_new_session=True)
        started.append(process)
        return Launched(process, tmp_path / "run")

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def steps_of(launched):
    return [event["step"] for event in launched.events("step")]


@pytest.mark.parametrize("count", [2, 4])
def test_a_run_over_several_hosts_is_told_from_the_head_alone(start, hosts, count):
    launched = start(hosts[:count], "-x", "SECRET=it's a $ecret", replicas=count)
    launched.await_event("child_ready", timeout_s=100.0, child=f"rollout/{count - 1}")
    family = launched.family(hosts)
    shown = [seen(launched, *words) for words in (("ps",), ("status",))]
    assert launched.ended() == 0, launched.output()
    await_nothing(launched.run_id, family)
    assert steps_of(launched) == list(range(1, 6))
    homes = {event["child"]: event["site"] for event in launched.events("child_spawned")}
    assert len({homes[f"rollout/{index}"] for index in range(count)}) == count
    assert f"rollout/{count - 1}" in shown[0]
    sampled = {event["actor"] for event in launched.events("policy_installed")}
    assert sampled >= {f"rollout/{index}" for index in range(count)}
    assert "rollout/0" in seen(launched, "logs", "rollout") or (launched.folder / "logs").is_dir()


def test_rollouts_over_ssh_are_killed_and_scaled_from_the_head(start, hosts):
    launched = start(hosts[:2], "--preflight", "full", steps=1000, replicas=2)
    launched.await_event("step", step=2)
    assert launched.output().startswith("preflight of 2 hosts, ")
    assert seen(launched, "kill", "rollout/1").startswith("killed rollout/1#1")
    launched.await_event("child_active", child="rollout/1", incarnation=2)
    assert seen(launched, "scale", "4").splitlines()[-1] == "4 rollouts"
    launched.await_event("child_active", child="rollout/3")
    homes = [event["site"] for event in launched.events("child_spawned") if "rollout" in event["child"]]
    assert len(set(homes)) == 2
    assert "rollout/3" in seen(launched, "ps")
    assert seen(launched, "scale", "1").splitlines()[-1] == "1 rollouts"
    assert "rollout/3" not in seen(launched, "tree")
    family = launched.family(hosts)
    seen(launched, "stop")
    assert launched.ended() == 143, launched.output()
    await_nothing(launched.run_id, family)
    left = [
        event for event in launched.events("child_exited") if event["child"] in {"rollout/2", "rollout/3"}
    ]
    assert {event["exit"] for event in left} <= {"stopped", "normal"}


def seen(launched, command, *words):
    done = subprocess.run(
        [sys.executable, "-m", "relax_actor", command, str(launched.folder), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("moment", ["at_start", "loading", "in_step"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_nothing(start, hosts, moment, times):
    launched = start(hosts[:2], steps=5000)
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
    assert launched.ended(40) == 130, launched.output()
    await_nothing(launched.run_id, family)


def test_a_killed_launcher_leaves_nothing_on_any_host(start, hosts):
    launched = start(hosts[:2], steps=5000)
    launched.await_event("step", step=1)
    family = launched.family(hosts)
    launched.process.kill()
    await_nothing(launched.run_id, family, but_sockets=True)


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
