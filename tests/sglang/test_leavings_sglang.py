"""What a real SGLang leaves in shared memory when its actor is killed, and who removes it."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from relax_actor.engines.sglang.server_files import SEGMENTS, SHARED_MEMORY
from transport import leavings
from transport.shm import ShmSpace

pytestmark = [pytest.mark.sglang, pytest.mark.fault, pytest.mark.timeout(200)]

DEADLINE_S = 120.0
ACTOR = """
    import sys, time
    from pathlib import Path
    from relax_actor.engines.sglang.client import Client
    from relax_actor.engines.sglang.server import Server
    from relax_actor.engines.sglang.settings import ServerSettings
    from transport import leavings

    python, model, log, note = sys.argv[1:]
    settings = ServerSettings(model=model, python=python, context_tokens=256, slots=4, dtype="float32")
    server = Server(settings, Path(log), remember=lambda files: leavings.write_down(Path(note), files))
    server.await_serving(Client(server.url), progress=lambda _: None)
    server.watch(print)
    print("serves", flush=True)
    time.sleep(600)
"""


def named_in(note: Path) -> set[Path]:
    """Return what a list names; other tests' servers have files of their own beside them."""
    lines = note.read_text().splitlines() if note.exists() else []
    return {Path(line.split(maxsplit=1)[1]) for line in lines}


@pytest.mark.parametrize("when", ["it serves", "it starts"])
def test_nothing_is_left_after_the_sweep_of_an_actor_that_was_killed(
    sglang_python, tiny_model, tmp_path, when
):
    space = ShmSpace(f"g{time.monotonic_ns()}")
    note = space.root / space.name("rollout/0", 1, leavings.LABEL)
    until = time.monotonic() + DEADLINE_S
    words = [sglang_python, str(tiny_model.path), str(tmp_path / "log"), str(note)]
    command = [sys.executable, "-c", textwrap.dedent(ACTOR), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as actor:
        if when == "it serves":
            assert actor.stdout.readline() == b"serves\n"
        while len(named_in(note)) < 2:  # its temporary folder comes first
            assert time.monotonic() < until
            time.sleep(0.01)
        actor.kill()
    named = named_in(note)
    folder, file = sorted(named, key=Path.is_file)
    assert list(folder.iterdir())  # else there was nothing to remove
    assert file.parent == SHARED_MEMORY
    assert file.name.startswith(SEGMENTS)
    while space.names():
        space.sweep()  # what a process that is still dying has stays for the next time
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not [path for path in named if path.exists()]
