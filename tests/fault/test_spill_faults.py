"""A run whose samples have no room in memory trains on all of them, wherever the queue dies."""

import pytest
from loop_run import assert_kept_its_promises, assert_trained_in_order, kills

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

TIGHT = {"max_size_gb": 5e-7}
"""Half a kilobyte: some samples stay, most move."""


def test_every_group_is_trained_on_exactly_once_wherever_the_queue_dies_while_it_moves_rows(run_loop):
    plan = kills("queue", ("spilling", 2), ("spilled", 3), "spilled", ("spilling", 2))
    run = run_loop.until_killed(plan, rollout={"scripted_token_s": 0.01}, queue=TIGHT)
    assert run.killed == ["queue"] * 4, run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert run.of("rows_spilled")
    assert not (run.folder / "spill").exists()


def test_a_spill_folder_that_cannot_be_written_is_said_and_stops_nothing(run_loop, tmp_path):
    """Rows stay in memory, and the run goes on."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "spill").symlink_to("/proc/sys")
    run = run_loop(folder=folder, queue=TIGHT)
    assert_kept_its_promises(run)
    assert not run.of("rows_spilled")
    assert "raise queue.max_size_gb" in run.of("spill_failed")[0]["reason"]
