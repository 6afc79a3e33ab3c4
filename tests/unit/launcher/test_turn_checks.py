"""What turns on the same GPUs do not go with is said before anything starts."""

import msgspec
import pytest

from launcher.turn_checks import turns
from relax_actor.config import Config, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig


@pytest.fixture
def config():
    return Config(
        run=RunConfig(colocate=True, max_staleness=0), model=ModelConfig(path="m"), data=DataConfig(path="d")
    )


@pytest.mark.parametrize(
    ("section", "value", "fact"),
    [
        ("run", RunConfig(colocate=True, max_staleness=2), "run.max_staleness is 2"),
        ("train", TrainConfig(stream_micro_batches=True), "stream_micro_batches"),
        ("rollout", RolloutConfig(engine="sglang", spares=1), "rollout.spares is 1"),
    ],
)
def test_what_needs_both_sides_at_once_is_refused(config, section, value, fact):
    (problem,) = turns(msgspec.structs.replace(config, **{section: value}), str)
    assert fact in str(problem)


def test_without_turns_and_with_all_that_they_need_nothing_is_wrong(config):
    assert not list(turns(config, str))
    assert not list(turns(msgspec.structs.replace(config, run=RunConfig()), str))
