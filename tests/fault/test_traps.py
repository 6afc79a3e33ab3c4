"""Traps that others fell into: a long TMPDIR, two trees on one host, a host that is far too busy."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from sample_actors import Counter

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.telemetry import read_events

pytestmark = pytest.mark.fault

LOAD_S = float(os.environ.get("RELAX_ACTOR_LOAD_S", "8"))
"""How long the load lasts; 60 for a run by hand."""

BUSY = "import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until: pass"


def spec_of(replicas=2):
    return SupervisorSpec(id="root", children=(ChildSpec(id="counter", actor=Counter, replicas=replicas),))


EMBEDDING = """
    import json
    from sample_actors import Counter
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec

    if __name__ == "__main__":
        child = ChildSpec(id="counter", actor=Counter)
        with Supervisor(SupervisorSpec(id="root", children=(child,))) as tree:
            print(json.dumps(tree.ref("counter", Counter).ask(Counter.add, 4).result()))
"""


def test_a_long_tmpdir_is_no_obstacle(tmp_path):
    """AF_UNIX paths have 107 bytes, and Slurm's TMPDIR alone may have more."""
    (tmp_path / "embed.py").write_text(textwrap.dedent(EMBEDDING))
    long = Path(tempfile.gettempdir()) / ("x" * 120)
    long.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "embed.py")],
            env={
                **os.environ,
                "TMPDIR": str(long),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
                ),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        subprocess.run(["rm", "-rf", str(long)], check=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 4


def test_the_end_of_one_tree_is_not_the_end_of_another(tmp_path):
    """Two trees of one user on one host; one is stopped, one loses its node agent."""
    with Supervisor(spec_of(), run_dir=tmp_path / "a") as a:
        with Supervisor(spec_of(), run_dir=tmp_path / "b") as b:
            psutil.Process(b.pid("counter/0")).parent().kill()
            counter = b.ref("counter/0", Counter).within(30)
            deadline = time.monotonic() + 30
            while counter.ask(Counter.where).result()[1] != 2:  # the first may answer once more
                assert time.monotonic() < deadline, "its tree did not start it again"
        assert a.ref("counter/0", Counter).ask(Counter.where).result()[1] == 1
        assert a.ref("counter/1", Counter).ask(Counter.add, 1).result() == 1


@pytest.mark.timeout(180)
def test_a_host_that_is_far_too_busy_is_not_taken_for_dead(tmp_path):
    """Sixteen busy processes: slow is not dead, and whoever is asked answers."""
    with Supervisor(spec_of(4), run_dir=tmp_path) as tree:
        load = [subprocess.Popen([sys.executable, "-c", BUSY.format(seconds=LOAD_S + 5)]) for _ in range(16)]
        try:
            refs = [tree.ref(f"counter/{replica}", Counter).within(60) for replica in range(4)]
            until, rounds = time.monotonic() + LOAD_S, 0
            while time.monotonic() < until:
                rounds += 1
                assert [ref.ask(Counter.add, 1).result() for ref in refs] == [rounds] * 4
        finally:
            for process in load:
                process.kill()
                process.wait()
        events, _ = read_events(tree.run_dir / "events.jsonl")
    deaths = {"child_dying", "child_exited", "child_restarting", "host_lost", "host_unreachable"}
    assert not [event for event in events if event["kind"] in deaths]
