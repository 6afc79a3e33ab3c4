"""Which process of a server is named when several end."""

import contextlib
import platform
import queue
import subprocess
import sys
import textwrap

import pytest
from watching import ended_after

from relax_actor.engines.sglang import watch as module
from relax_actor.engines.sglang.watch import Watch


@pytest.fixture
def processes():
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(3)]
        yield made
        for process in made:
            process.kill()


def watched(processes):
    """Watch a parent and two children; return where the one that is named comes."""
    named = queue.SimpleQueue()
    names = ["main", "scheduler", "detokenizer"]
    return Watch({each.pid: name for each, name in zip(processes, names, strict=True)}, named.put), named


def test_who_ends_alone_is_named(processes):
    watch, named = watched(processes)
    processes[1].kill()
    assert named.get(timeout=20).startswith("scheduler")
    watch.close()


def test_the_parent_is_named_where_its_children_are_seen_to_end_first(processes, monkeypatch):
    """The kernel kills them while the parent's other threads are still ending."""
    monkeypatch.setattr(module, "FAMILY_S", 60.0)
    watch, named = watched(processes)
    for process in reversed(processes):
        process.kill()
        process.wait()
    assert named.get(timeout=20).startswith("main")
    watch.close()


ENDS_SLOWLY = """
    import ctypes, signal, subprocess, sys, threading, time

    libc = ctypes.CDLL(None)
    kill_with_parent = lambda: libc.prctl(1, signal.SIGKILL)
    child = subprocess.Popen(["sleep", "60"], preexec_fn=kill_with_parent)
    threading.Thread(target=time.sleep, args=(60,)).start()
    print(child.pid, flush=True)
    sys.stdin.readline()
    libc.syscall(int(sys.argv[1]), 0)  # ends this thread, and no other one
"""
EXIT = {"x86_64": 60, "aarch64": 93}


@pytest.mark.skipif(platform.machine() not in EXIT, reason="the number of the system call is not known")
def test_the_parent_is_named_where_its_other_threads_take_long_to_end():
    """As on a machine where others have the cores: its children are gone, and it is not."""
    command = [sys.executable, "-c", textwrap.dedent(ENDS_SLOWLY), str(EXIT[platform.machine()])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ended_after(subprocess.Popen(command, **pipes)) as parent:
        child = int(parent.stdout.readline())
        named = queue.SimpleQueue()
        watch = Watch({parent.pid: "main", child: "scheduler"}, named.put)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert named.get(timeout=20).startswith("main")
        assert parent.poll() is None
        watch.close()
