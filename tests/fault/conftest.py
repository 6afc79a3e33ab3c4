"""Fixtures of the loop under fire."""

import os
import subprocess

import pytest
from loop_run import LoopRunner


@pytest.fixture
def run_loop(tmp_path, tiny_model) -> LoopRunner:
    """Run the loop on the tiny model, in a folder of its own each time."""
    return LoopRunner(tmp_path, tiny_model)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs was refused: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
