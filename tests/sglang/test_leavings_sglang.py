"""What a real SGLang leaves on its host when its actor is killed, and who removes it."""

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
MADE = ("sglang_loads_", "sem.mp-")
"""What is sure to be there: the second since weights were read, for a progress bar that nobody sees."""
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
    client = Client(server.url)
    server.await_serving(client, progress=lambda _: None)
    files = {"model_path": model, "load_format": "auto", "flush_cache": False, "weight_version": "1"}
    client.post("/update_weights_from_disk", files, deadline_s=60.0)
    print("has loaded", flush=True)
    time.sleep(600)
"""


def named_in(note: Path) -> set[Path]:
    """Return what a list names; other tests' servers have files of their own beside them."""
    return {path for _, path in leavings.listed(note)}


def test_nothing_is_left_after_the_sweep_of_an_actor_that_was_killed(sglang_python, tiny_model, tmp_path):
    space = ShmSpace(f"g{time.monotonic_ns()}")
    note = space.root / space.name("rollout/0", 1, leavings.LABEL)
    until = time.monotonic() + DEADLINE_S
    words = [sglang_python, str(tiny_model.path), str(tmp_path / "log"), str(note)]
    command = [sys.executable, "-c", textwrap.dedent(ACTOR), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as actor:
        assert actor.stdout.readline() == b"has loaded\n"
        while not all(any(file.name.startswith(start) for file in named_in(note)) for start in MADE):
            assert time.monotonic() < until
            time.sleep(0.01)
        actor.kill()
    named = named_in(note)
    (folder,) = [path for path in named if path.is_dir()]
    assert list(folder.iterdir())  # temporary files and sockets of the server's
    assert all(path.parent == SHARED_MEMORY and path.name.startswith(SEGMENTS) for path in named - {folder})
    while space.names():
        space.sweep()  # what a process that is still dying has stays for the next time
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not [path for path in named if path.exists()]
