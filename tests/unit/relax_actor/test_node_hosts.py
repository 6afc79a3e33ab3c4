"""What a node agent knows of its host: control groups, memory, devices. Files and drivers are handed in."""

import asyncio
import os
import types

import pytest

from relax_actor.node import cgroup, devices
from relax_actor.node.cgroup import OOM_LOOK_S, Cgroups, OomWatch
from relax_actor.node.devices import DeviceGate, await_release
from transport.clock import ManualClock


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """What the gate needs of pynvml: who uses which card, as [pid, bytes] by index."""

    NVMLError = FakeNvmlError

    def __init__(self, users):
        self.users = users
        self.looks = 0

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802 - pynvml's name
        if index not in self.users:
            raise FakeNvmlError(index)
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802 - pynvml's name
        self.looks += 1
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.users[handle]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802 - pynvml's name
        return [] if handle in self.users else None


def is_ours(pid):
    return pid in {os.getpid(), 999_999_999}


def test_who_still_holds_a_device_is_named():
    gate = DeviceGate(FakeNvml({5: [(os.getpid(), 812 << 20), (1, 1 << 30)]}))
    (holder,) = gate.holders(["cuda:5"], is_ours)
    assert holder.startswith(f"GPU 5 still holds 812 MiB of pid {os.getpid()} (")


def test_a_holder_whose_process_is_gone_is_named_all_the_same():
    gate = DeviceGate(FakeNvml({0: [(999_999_999, None)]}))
    assert gate.holders(["0"], is_ours) == ["GPU 0 still holds 0 MiB of pid 999999999 (its process is gone)"]


@pytest.mark.parametrize("device", ["gpu:7", "cpu", "numa:0"])
def test_a_card_that_is_lost_and_what_is_no_card_hold_nothing(device):
    assert DeviceGate(FakeNvml({})).holders([device], is_ours) == []


def test_without_a_driver_nothing_is_held():
    assert DeviceGate(None).holders(["cuda:0"], is_ours) == []


def test_a_host_without_a_library_has_no_gate(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert DeviceGate.of_this_host().holders(["cuda:0"], is_ours) == []


def test_the_gate_opens_when_the_memory_is_back(monkeypatch):
    monkeypatch.setattr(devices, "POLL_S", 0.0)
    nvml = FakeNvml({0: [(os.getpid(), 1 << 20)]})

    def leave_on_the_third_look(pid):
        if nvml.looks == 3:
            nvml.users[0] = []
        return is_ours(pid)

    assert asyncio.run(await_release(DeviceGate(nvml), ["cuda:0"], leave_on_the_third_look, 10.0)) == ""
    assert nvml.looks == 4


def test_the_gate_names_the_holder_when_its_time_is_over():
    nvml = FakeNvml({0: [(os.getpid(), 3 << 20)]})
    held = asyncio.run(await_release(DeviceGate(nvml), ["cuda:0", "cuda:9"], is_ours, 0.0))
    assert held.startswith("GPU 0 still holds 3 MiB")


def mounted(folder):
    return f"tmpfs / tmpfs rw 0 0\ncgroup2 {folder} cgroup2 rw 0 0\n"


def test_control_groups_are_made_below_ones_own(tmp_path):
    own = tmp_path / "user.slice"
    own.mkdir()
    (own / "cgroup.procs").touch()
    found = cgroup.root("run1", 77, mounted(tmp_path), "4:memory:/x\n0::/user.slice\n")
    assert found == own / "relax-actor-run1-77"


@pytest.mark.parametrize(
    ("mounts", "own"),
    [("tmpfs / tmpfs rw 0 0\n", "0::/\n"), ("cgroup2 {} cgroup2 rw 0 0\n", "4:memory:/x\n")],
)
def test_a_host_without_version_2_has_no_control_groups(tmp_path, mounts, own):
    assert cgroup.root("run1", 77, mounts.format(tmp_path), own) is None


def test_control_groups_that_are_not_ours_to_make_are_done_without(tmp_path):
    assert cgroup.root("run1", 77, mounted(tmp_path / "missing"), "0::/\n") is None
    (tmp_path / "file").touch()
    groups = Cgroups(tmp_path / "file" / "below")
    assert groups.make("rollout/3", 1) == ""
    assert groups.make("rollout/3", 2) == ""
    assert groups.end("rollout/3", 1)
    assert groups.oom_evidence("rollout/3", 1) == ""
    groups.close()


def test_a_control_group_that_is_not_empty_is_killed_and_looked_at_again(tmp_path):
    groups = Cgroups(tmp_path)
    folder = groups.make("rollout/3", 1)
    assert folder.endswith("rollout~3.1")
    events, kill = tmp_path / "rollout~3.1" / "cgroup.events", tmp_path / "rollout~3.1" / "cgroup.kill"
    events.write_text("populated 1\nfrozen 0\n")
    assert not groups.end("rollout/3", 1)
    assert kill.read_text() == "1"
    kill.unlink()
    events.write_text("populated 0\nfrozen 0\n")
    assert not groups.end("rollout/3", 1)  # a folder of real files cannot be removed as a control group can
    events.unlink()
    assert not groups.end("rollout/3", 1)
    (tmp_path / "rollout~3.1").rmdir()
    assert groups.end("rollout/3", 1)


def test_an_actors_own_group_counts_kills_for_want_of_memory(tmp_path):
    groups = Cgroups(tmp_path)
    folder = tmp_path / "rollout~3.1"
    assert str(folder) == groups.make("rollout/3", 1)
    assert groups.oom_evidence("rollout/3", 1) == ""
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert groups.oom_evidence("rollout/3", 1) == f"{folder}/memory.events oom_kill 1"


def test_a_shared_counter_is_evidence_once_each_time_it_rises(tmp_path):
    counter = tmp_path / "memory.oom_control"
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    watch = OomWatch(counter)
    assert watch.evidence() == ""
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert watch.evidence() == f"{counter} oom_kill +1"
    assert watch.evidence() == ""


def test_what_a_shared_counter_counted_long_before_is_no_evidence(tmp_path):
    """On a host without control groups it is the machine's, and others die there, too."""
    counter, clock = tmp_path / "vmstat", ManualClock()
    counter.write_text("oom_kill 4\n")
    watch = OomWatch(counter, clock)
    counter.write_text("oom_kill 5\n")
    for _ in range(10):
        watch.look()
        clock.advance(OOM_LOOK_S)
    assert watch.evidence() == ""
    counter.write_text("oom_kill 6\n")
    clock.advance(OOM_LOOK_S)
    watch.look()
    clock.advance(OOM_LOOK_S)
    assert watch.evidence() == f"{counter} oom_kill +1"


def test_every_host_counts_kills_for_want_of_memory_somewhere():
    assert OomWatch().evidence() == ""
