"""What SGLang leaves in shared memory when it is killed is known by who has it open."""

import os
from pathlib import Path

from relax_actor.engines.sglang.server import _segments


def test_files_of_sglangs_own_are_found_by_who_has_them_open():
    ours = Path(f"/dev/shm/sglang_loads_test_{os.getpid()}.shm")  # noqa: S108 - SGLang's folder
    other = Path(f"/dev/shm/other_{os.getpid()}")  # noqa: S108 - the same
    try:
        with ours.open("wb"), other.open("wb"):
            assert _segments(os.getpid()) == {ours}
        assert _segments(os.getpid()) == set()
    finally:
        ours.unlink()
        other.unlink()


def test_a_process_that_is_gone_has_none():
    assert _segments(2**22 + 1) == set()
