"""A rollout that gives up what is in flight before it sleeps: what has finished meanwhile is put whole."""

from types import SimpleNamespace

import numpy as np
import pytest

from relax_actor.config import Config, DataConfig, ModelConfig, RolloutConfig
from relax_actor.engines.base import Completion, Request, SamplingParams
from relax_actor.protocol import FinishReason
from relax_actor.roles.rollout import Rollout


def completion(sample, tokens, reason):
    request = Request(group_id=7, sample_index=sample, prompt=(5,), params=SamplingParams(max_new_tokens=4))
    return Completion(
        request=request,
        tokens=np.full(tokens, 9, np.int32),
        logprobs=np.full(tokens, -1.0, np.float32),
        versions=np.zeros(tokens, np.int32),
        finish_reason=reason,
    )


COMPLETIONS = [
    completion(0, 4, FinishReason.LENGTH),
    completion(1, 2, FinishReason.ABORT),
    completion(2, 0, FinishReason.ABORT),
    completion(3, 1, FinishReason.STOP),
]


class Parking(Rollout):
    """A rollout with nothing but samples in flight."""

    def __init__(self, *, deterministic):
        self.whole, self.parts = [], []
        self._config = Config(
            model=ModelConfig(path="m"),
            data=DataConfig(path="d"),
            rollout=RolloutConfig(engine="sglang", deterministic=deterministic),
        )
        self._leases = {each.request.key: 1 for each in COMPLETIONS}
        self._busy = SimpleNamespace(end=lambda: None)
        self._prompts = SimpleNamespace(stop_asking=lambda: None)
        self._engine = SimpleNamespace(
            lengths=lambda: dict.fromkeys(self._leases, 0),
            abort=lambda keys: [each for each in COMPLETIONS if each.request.key in keys],
        )

    def _put(self, completions):
        self.whole += [each.request.sample_index for each in completions]
        for each in completions:
            del self._leases[each.request.key]

    def _hand_over_chunks(self, unfinished):
        self.parts += [each.request.sample_index for each in unfinished]


@pytest.mark.parametrize(("deterministic", "parts"), [(False, [1]), (True, [])])
def test_what_finishes_while_it_is_parked_is_no_prefix_of_another(deterministic, parts):
    """Whoever went on from it would find that it has come to its end, and its group would be dropped."""
    rollout = Parking(deterministic=deterministic)
    assert rollout._park() == 2
    assert (rollout.whole, rollout.parts) == ([0, 3], parts)
    assert rollout._leases == {}
