"""Node agent and head are killed while real SGLang servers sample or start: nothing stays or is lost."""

import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import watching
from loop_run import (
    ENDLESS_STEPS,
    assert_kept_its_promises,
    assert_trained_in_order,
    leftovers,
)
from watching import ended_after

from relax_actor.node import remains
from relax_actor.node.names import socket_folders
from relax_actor.telemetry import Event, read_events
from transport import leavings
from transport.shm import ShmSpace

pytestmark = [pytest.mark.sglang, pytest.mark.fault, pytest.mark.timeout(400)]

DEADLINE_S = 300.0
eventually = partial(watching.eventually, timeout_s=DEADLINE_S / 3, poll_s=0.02)
REPLICAS = 2
ENDLESS = {"steps": ENDLESS_STEPS}
HEAD = """
    import sys
    from pathlib import Path
    import msgspec
    from relax_actor import app
    from relax_actor.config import Config

    if __name__ == "__main__":
        config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
        app.run(config, Path(sys.argv[2]), run_id=sys.argv[3], env={"OMP_NUM_THREADS": "1"})
"""


@pytest.fixture
def sections(sglang_python):
    """A run of replicas that have a server each."""
    rollout = {"engine": "sglang", "replicas": REPLICAS, "max_new_tokens": 24, "sglang_python": sglang_python}
    return {"rollout": rollout, "run": {"steps": 6}, "train": {"checkpoint_every": 2}}


@pytest.fixture
def run_id():
    """Of a run of this test's; another worker may run the next one at the same time."""
    return secrets.token_hex(4)


class Saboteur:
    """Kills all detokenizers once a step is done, and the node agent while the next servers start."""

    def __init__(self) -> None:
        self.killed: list[psutil.Process] = []

    def __call__(self, folder: Path) -> None:
        if not self.killed and events_of(folder, "step"):
            mains = [psutil.Process(event["server_pid"]) for event in events_of(folder, "engine_started")]
            self._kill(
                child
                for main in mains
                for child in main.children(recursive=True)
                if "detokenizer" in " ".join(child.cmdline())
            )
        logs = [folder / "logs" / f"rollout-{replica}-2.sglang.log" for replica in range(REPLICAS)]
        if len(self.killed) == REPLICAS and all(log.exists() for log in logs):
            trainer = psutil.Process(events_of(folder, "step")[0]["pid"])
            self._kill([trainer.parent()])

    def _kill(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            process.kill()
            self.killed.append(process)


def test_no_sample_is_lost_when_detokenizers_die_and_then_the_node_agent(run_loop, sections):
    """I2, I7, I8: the agent takes with it servers that start."""
    saboteur = Saboteur()
    run = run_loop(**sections, on_tick=saboteur, deadline_s=DEADLINE_S)
    assert len(saboteur.killed) == REPLICAS + 1, run.log
    assert_kept_its_promises(run, waits=False)
    assert_trained_in_order(run)
    first = [run.of("child_exited", child=f"rollout/{replica}")[0] for replica in range(REPLICAS)]
    assert all("detokenizer" in event["reason"] for event in first)


def test_nothing_is_left_when_the_head_is_killed_while_servers_sample(run_loop, sections, tmp_path, run_id):
    """I8: its node agent ends the servers and sweeps."""
    with head_of(run_loop.config(**sections | {"run": ENDLESS}), tmp_path, run_id) as head:
        eventually(lambda: events_of(tmp_path, "step"))
        servers = [psutil.Process(event["server_pid"]) for event in events_of(tmp_path, "engine_started")]
        head.kill()
    assert len(servers) == REPLICAS
    eventually(lambda: not any(server.is_running() for server in servers))
    eventually(lambda: leftovers(tmp_path, run_id) == [])


def test_the_next_start_clears_away_what_all_who_would_sweep_left_in_the_midst_of_starts(
    run_loop, sections, tmp_path, run_id
):
    """I8: head, keeper and node agent are killed at one moment; nobody else is there to do it."""
    space, one = ShmSpace(run_id), sections["rollout"] | {"replicas": 1}
    config = run_loop.config(**sections | {"rollout": one, "run": ENDLESS})
    with head_of(config, tmp_path, run_id) as head:
        eventually(lambda: noted(space))
        spawned = events_of(tmp_path, "child_spawned")[0]
        agent = psutil.Process(spawned["pid"]).parent()
        everybody = [psutil.Process(head.pid), agent.parent(), agent]
        for process in everybody:
            process.suspend()  # so that nobody of them sees another's end
        for process in everybody:
            process.kill()
    left = [path for path in noted(space) if path.exists()]
    assert left  # else there was nothing to remove

    def is_cleared():
        remains.clear_dead(socket_folders())  # or a start of another test's has done it
        folders = [path for path in socket_folders().iterdir() if run_id in path.name]
        return [path for path in left if path.exists()] + folders + leftovers(tmp_path, run_id) == []

    eventually(is_cleared)


def head_of(config, folder: Path, run_id: str) -> "AbstractContextManager[subprocess.Popen[bytes]]":
    """Start a run in a process of its own."""
    (folder / "head.py").write_text(textwrap.dedent(HEAD))
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    words = [sys.executable, str(folder / "head.py"), str(folder / "config.json"), str(folder), run_id]
    return ended_after(subprocess.Popen(words))


def noted(space: ShmSpace) -> list[Path]:
    """Return the files in shared memory of which a rollout of the run has written down that they may stay."""
    notes = [space.root / name for name in space.names() if name.endswith(f"-{leavings.LABEL}")]
    files = [path for note in notes for _, path in leavings.listed(note)]
    return [path for path in files if path.parent == space.root]


def events_of(folder: Path, kind: str) -> list[Event]:
    log = folder / "events.jsonl"
    return [event for event in read_events(log)[0] if event["kind"] == kind] if log.exists() else []
