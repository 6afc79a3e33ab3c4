"""What a head leaves on its own host when it is killed, and nobody else of its run is there."""

import subprocess
import sys
import tempfile
from pathlib import Path

from watching import eventually

from relax_actor.supervision.foothold import Foothold
from transport.shm import ShmSpace

HEAD = """
import sys
from relax_actor.supervision.foothold import Foothold
foothold = Foothold(sys.argv[1], sys.argv[2])
foothold.keep_clear(7)
foothold.space.create("head", 7, "large", 100)
print(foothold.folder, flush=True)
sys.stdin.read()
"""


def test_a_killed_head_leaves_neither_its_folder_nor_its_segments(tmp_path):
    others = [
        ShmSpace("aaaa0002", tmp_path).create("head", 7, "large", 100).name,
        ShmSpace("aaaa0001", tmp_path).create("head", 71, "large", 100).name,
    ]
    argv = [sys.executable, "-c", HEAD, "aaaa0001", str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        folder = Path(head.stdout.readline().strip())
        assert folder.is_dir()
        assert len(list(tmp_path.iterdir())) == 3
        head.kill()
    eventually(lambda: not folder.exists() and len(list(tmp_path.iterdir())) == 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(others)


def test_a_head_that_leaves_takes_its_caretaker_along(tmp_path):
    foothold = Foothold("aaaa0003", tempfile.mkdtemp(dir=tmp_path))
    foothold.keep_clear(1)
    (foothold.folder / "head").touch()
    foothold.leave()
    assert not foothold.folder.exists()
    assert foothold._caretaker.returncode == 0
