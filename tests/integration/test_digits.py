"""A vision language model goes round the loop: its images reach rollout and trainer, and are freed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop_run import LoopRunner, assert_kept_its_promises, assert_trained_in_order

pytestmark = pytest.mark.timeout(180)

PREPARE = Path(__file__).parents[2] / "examples" / "digits" / "prepare.py"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Prepare the example with a model that has learned nothing yet."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, str(PREPARE), str(folder), "--steps", "0"], check=True, timeout=100)
    return folder


def sections(digits: Path, *, updates: int = 1) -> dict[str, dict[str, object]]:
    return {
        "run": {"steps": 3, "max_staleness": 0, "mode": "async_on_policy"},
        "model": {"path": str(digits)},
        "data": {"path": str(digits / "train.jsonl"), "media_key": "image"},
        "rollout": {"engine": "transformers", "max_new_tokens": 3, "max_in_flight": 32},
        "train": {"updates_per_batch": updates},
        "eval": {"path": str(digits / "heldout.jsonl"), "every": 3, "max_prompts": 8},
    }


def test_pictures_are_trained_on_once_and_seen_alike_by_rollout_and_trainer(run_loop: LoopRunner, digits):
    run = run_loop(**sections(digits, updates=2))
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert all(step["grad_norm"] > 0 and step["mismatch_abs"] < 1e-5 for step in run.history)
    assert len(run.of("eval")) == 2


def test_a_picture_that_does_not_fit_its_placeholders_is_not_sampled(run_loop: LoopRunner, digits, tmp_path):
    rows = [json.loads(line) for line in (digits / "train.jsonl").read_text().splitlines()[:20]]
    rows[3]["prompt"] = rows[3]["prompt"].replace("<|image_pad|> ", "", 1)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = sections(digits)
    overrides["data"] = {"path": str(path), "media_key": "image", "shuffle": False}
    run = run_loop(**overrides)
    assert_kept_its_promises(run)
    assert 3 not in run.trained
