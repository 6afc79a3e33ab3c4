"""Kill the writer at every point of a save, and fill the disk under it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relax_actor.faults import Fault, plan
from relax_actor.trainers.checkpoint import CheckpointSpaceError, CheckpointStore

pytestmark = pytest.mark.fault

FILES = 3
POINTS = [("checkpoint_file", n + 1) for n in range(FILES)] + [
    ("checkpoint_manifest", 1),
    ("checkpoint_rename", 1),
]

WRITER = """
import sys
from pathlib import Path
from relax_actor.faults import arm
from relax_actor.trainers.checkpoint import CheckpointStore

def write(folder):
    (folder / "model").mkdir()
    for name in ("model/a", "model/b", "c"):
        (folder / name).write_bytes(name.encode() * 1000)

store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.save(1, write, {"n": 1})
arm("trainer", 1)
store.save(2, write, {"n": 2})
"""


def run_writer(folder: Path, faults: list[Fault]) -> int:
    """Save checkpoint 1, then checkpoint 2 with the faults armed; return the exit code."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    return subprocess.run(command, env={**os.environ, **plan(faults)}, check=False, timeout=60).returncode


@pytest.mark.parametrize(("name", "nth"), POINTS)
def test_a_kill_at_any_point_leaves_the_previous_checkpoint_and_the_next_save_works(tmp_path, name, nth):
    fault = Fault(actor="trainer", point=name, nth=nth)

    assert run_writer(tmp_path, [fault]) == -9

    store = CheckpointStore(tmp_path)
    found = store.latest()
    assert (found.step, found.meta) == (1, {"n": 1})
    assert store.ignored == {}
    store.save(2, lambda folder: (folder / "c").write_bytes(b"again"), {})
    assert store.latest().step == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_points_are_all_there_are(tmp_path):
    """One more than the last of each is never reached, so no moment of a save is left out above."""
    beyond = [
        Fault(actor="trainer", point="checkpoint_file", nth=FILES + 1),
        Fault(actor="trainer", point="checkpoint_manifest", nth=2),
        Fault(actor="trainer", point="checkpoint_rename", nth=2),
    ]

    assert run_writer(tmp_path, beyond) == 0
    assert CheckpointStore(tmp_path).latest().step == 2


def test_an_interrupted_clean_up_leaves_nothing_that_looks_whole(tmp_path):
    """The manifest goes first, so what is left of an old checkpoint cannot be mistaken for one."""
    store = CheckpointStore(tmp_path, keep=1)
    old = store.save(1, lambda folder: (folder / "c").write_bytes(b"old"), {})
    copy = shutil.copytree(old, tmp_path / "copy")
    new = store.save(2, lambda folder: (folder / "c").write_bytes(b"new"), {})
    (copy / "manifest.json").unlink()
    copy.rename(old)

    assert store.latest().path == new
    newest = store.save(3, lambda folder: (folder / "c").write_bytes(b"newest"), {})
    assert list(tmp_path.iterdir()) == [newest]


def test_a_full_disk_leaves_the_previous_checkpoint_whole_and_says_need_and_have(small_disk):
    store = CheckpointStore(small_disk / "checkpoints")
    whole = store.save(1, lambda folder: (folder / "c").write_bytes(b"0" * 300_000), {})

    with pytest.raises(CheckpointSpaceError) as caught:
        store.save(2, lambda folder: (folder / "c").write_bytes(b"0" * 900_000), {})

    assert 600_000 < caught.value.have_bytes < caught.value.need_bytes
    assert store.latest().path == whole
    assert store.save(3, lambda folder: (folder / "c").write_bytes(b"0" * 300_000), {}).is_dir()


def test_a_full_disk_under_safetensors_is_told_as_such(small_disk):
    """It turns the operating system's error into text of its own."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {"weight": torch.zeros(2**19)}
    store = CheckpointStore(small_disk)

    with pytest.raises(CheckpointSpaceError):
        store.save(1, lambda folder: save_file(tensors, folder / "weights.safetensors"), {})

    assert store.latest() is None
    assert list(small_disk.iterdir()) == []


def test_the_second_of_two_that_do_not_fit_is_refused_before_it_is_written(small_disk):
    store = CheckpointStore(small_disk)
    store.save(1, lambda folder: (folder / "c").write_bytes(b"0" * 600_000), {})

    with pytest.raises(CheckpointSpaceError, match="needs at least 600000 bytes"):
        store.save(2, lambda _: pytest.fail("it was written"), {})
