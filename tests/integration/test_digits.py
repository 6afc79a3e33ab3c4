"""A vision language model goes round the loop: its images reach rollout and trainer, and are freed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from loop_run import LoopRunner, assert_kept_its_promises, assert_trained_in_order

from relax_actor.config import DataConfig, ModelConfig, TrainConfig
from relax_actor.data.dataset import load_dataset
from relax_actor.data.template import PromptEncoder
from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.errors import RequestError
from relax_actor.engines.vision_engine import VisionEngine
from relax_actor.trainers.base import TrainSequence
from relax_actor.trainers.torch_backend import TorchBackend

pytestmark = pytest.mark.timeout(300)

PREPARE = Path(__file__).parents[2] / "examples" / "digits" / "prepare.py"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Prepare the example with a model that has learned nothing yet."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, str(PREPARE), str(folder), "--steps", "0"], check=True, timeout=250)
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


@pytest.fixture
def backend(digits):
    """Make a trainer whose reference is the model as it was."""

    def make() -> TorchBackend:
        train = TrainConfig(learning_rate=1e-2, kl_coef=0.1)
        return TorchBackend(ModelConfig(path=str(digits), dtype="float32"), train, total_steps=3)

    return make


@pytest.fixture
def requests(digits) -> list[Request]:
    """Ask for answers to the first four pictures."""
    config = DataConfig(path=str(digits / "train.jsonl"), media_key="image")
    encoder = PromptEncoder(digits, config)
    params = SamplingParams(max_new_tokens=3, stop_token_ids=(2,))
    return [
        Request(group_id=n, sample_index=0, prompt=tuple(encoder.encode(row)), params=params, media=row.media)
        for n, row in enumerate(load_dataset(config).rows[:4])
    ]


def sampled(digits, backend, requests, *, deterministic):
    engine = VisionEngine(digits, seed=0, slots=8, dtype="float32", deterministic=deterministic)
    engine.install(1, backend.weights())
    engine.submit(requests)
    done = [completion for _ in range(3) for completion in engine.step()]
    assert engine.in_flight == 0
    return sorted(done, key=lambda completion: completion.request.key)


def sequences(completions):
    return [
        TrainSequence(
            prompt=np.array(done.request.prompt, np.int32),
            response=done.tokens,
            rollout_logprobs=done.logprobs,
            advantage=float((-1) ** done.request.group_id),
            media=done.request.media,
        )
        for done in completions
    ]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_checkpoint_of_a_model_with_images_goes_on_as_if_nothing_had_been(
    digits, backend, requests, tmp_path, deterministic
):
    first, second = backend(), backend()
    batch = sequences(sampled(digits, first, requests, deterministic=deterministic))
    first.begin_update(total_tokens=sum(len(each.response) for each in batch), total_sequences=len(batch))
    stats = first.accumulate(batch)
    assert stats.mismatch_abs_sum < 1e-4
    assert first.finish_update().grad_norm > 0
    first.save(tmp_path)
    second.load(tmp_path)
    before, after = first.logprobs(batch), second.logprobs(batch)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert abs(before[0] - batch[0].rollout_logprobs).max() > 1e-3
    again = sequences(sampled(digits, second, requests, deterministic=deterministic))
    for ours, theirs in zip(second.logprobs(again), again, strict=True):
        np.testing.assert_allclose(ours, theirs.rollout_logprobs, atol=1e-4)
    assert not {0, 3, 4, 5, 6} & {token for each in again for token in each.response.tolist()}


@pytest.mark.parametrize("wrong", ["no media", "a name too few", "patches too few"])
def test_a_request_with_other_images_than_placeholders_is_refused(digits, backend, requests, wrong):
    engine = VisionEngine(digits, seed=0, slots=8, dtype="float32")
    engine.install(1, backend().weights())
    pixels, grid = requests[0].media["pixel_values"], requests[0].media["image_grid_thw"]
    media = {
        "no media": None,
        "a name too few": {"pixel_values": pixels},
        "patches too few": {"pixel_values": pixels[:3], "image_grid_thw": grid},
    }[wrong]
    bad = Request(
        group_id=9, sample_index=0, prompt=requests[0].prompt, params=requests[0].params, media=media
    )
    with pytest.raises(RequestError):
        engine.submit([bad])
    assert engine.in_flight == 0
