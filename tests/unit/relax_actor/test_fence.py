"""When an actor ends itself, and the kernel's timer behind that."""

import math
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watching import eventually

from relax_actor.actor import page
from relax_actor.actor.page import PageWriter
from relax_actor.node import fuse
from relax_actor.node.fuse import Fuse
from relax_actor.node.lease import ActorFence, LeaseTerms
from relax_actor.node.process import start_time
from transport.shm import ShmSpace

TERMS = LeaseTerms(ttl_s=10.0, renew_s=2.0, drift_frac=0.1, margin_s=1.0)


def test_all_fences_act_before_the_head_gives_the_host_up_on_a_clock_that_drifts():
    """Agent, actor, kernel, in this order, and all of them before a successor may be started."""
    slowest_s = (TERMS.ttl_s + TERMS.kernel_grace_s) * (1.0 + TERMS.drift_frac)
    assert 0 < TERMS.actor_grace_s < TERMS.kernel_grace_s
    assert slowest_s < TERMS.patience_s


def test_an_actor_lives_while_the_lease_holds_and_is_told_when_to_look_again():
    assert ActorFence(TERMS).look(100.0, 108.0) == 8.25


def test_what_is_over_is_looked_at_twice():
    fence = ActorFence(TERMS)
    assert fence.look(108.25, 108.0) == 0.0
    assert fence.look(108.25, 108.0) is None


def test_a_write_that_was_met_half_done_ends_nobody():
    fence = ActorFence(TERMS)
    assert fence.look(108.25, 1e-300) == 0.0
    assert fence.look(108.25, 118.0) == pytest.approx(10.0)
    assert fence.look(118.25, 118.0) == 0.0


def test_without_a_lease_there_is_no_fence():
    assert ActorFence(TERMS).look(1e9, math.inf) == math.inf


@given(st.lists(st.floats(0.0, 1000.0), min_size=1), st.floats(0.0, 10.0))
def test_an_actor_that_looks_late_dies_of_no_lateness_of_its_own(pauses_s, age_s):
    """Stopped, or without the interpreter lock for however long: it is the agent that must be late."""
    fence, now_s = ActorFence(TERMS), 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        assert fence.look(now_s, now_s - age_s + TERMS.ttl_s)  # the agent renewed `age_s` ago


def test_the_page_says_until_when_the_lease_holds(tmp_path):
    space = ShmSpace("testrun", tmp_path)
    segment = page.create(space, "a", 1)
    writer = PageWriter(space, "a", 1)
    assert writer.held_until_s == math.inf
    page.hold_until(segment, 12.5)
    assert writer.held_until_s == 12.5


def run(code):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=90, check=False)


LIT = """
    import ctypes, os, signal, time
    from relax_actor.node.fuse import Fuse

    fuse = Fuse()
    fuse.light(time.clock_gettime(time.CLOCK_BOOTTIME) + {after_s})
    {then}
    print("alive")
"""


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), signal.SIGSTOP)", "ctypes.PyDLL(None).sleep(60)"])
def test_the_kernel_kills_who_is_stopped_or_holds_the_interpreter_lock(then):
    done = run(LIT.format(after_s=0.05, then=then))
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_the_kernel_kills_at_once_where_the_moment_has_passed():
    assert run(LIT.format(after_s=-5.0, then="time.sleep(60)")).returncode == -signal.SIGKILL


def test_a_fuse_that_is_lit_again_in_time_kills_nobody():
    again = "fuse.light(time.clock_gettime(time.CLOCK_BOOTTIME) + 600); time.sleep({})"
    said = (run(LIT.format(after_s=s, then=again.format(s + 0.1))).stdout for s in (0.3, 3.0, 20.0))
    assert "alive\n" in said  # the first time, unless it was not in time


def test_a_kernel_that_gives_no_timer_is_told_of(monkeypatch):
    monkeypatch.setattr(fuse.time, "CLOCK_BOOTTIME", 4711)
    with pytest.raises(OSError, match="Invalid argument"):
        Fuse()


def test_a_library_without_timers_is_told_of(monkeypatch):
    monkeypatch.setattr(fuse, "_libc", object())
    with pytest.raises(OSError, match="timer_create"):
        Fuse()


GROUP = """
    import os, subprocess, sys
    from relax_actor.actor.fence import end_with_group

    os.setpgid(0, 0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    end_with_group(75)
"""


def test_whoever_ends_takes_its_group_along_and_leaves_an_exit_code():
    done = run(GROUP)
    assert done.returncode == 75
    child = int(done.stdout)
    eventually(lambda: start_time(child) is None)  # killed by now; somebody else reaps it
