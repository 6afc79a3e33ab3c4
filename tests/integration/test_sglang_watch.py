"""Which process of a server is named when several end."""

import contextlib
import queue
import subprocess

import pytest

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
