"""Fixtures of the loop as a whole."""

import pytest
from loop_run import LoopRunner


@pytest.fixture
def run_loop(tmp_path, tiny_model) -> LoopRunner:
    """Run the loop on the tiny model, in a folder of its own each time."""
    return LoopRunner(tmp_path, tiny_model)
