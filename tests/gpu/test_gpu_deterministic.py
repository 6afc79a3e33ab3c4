"""A trainer on a GPU makes the same updates again, as the same samples after a kill need it to."""

import numpy as np
import pytest
import torch

from relax_actor.config import ModelConfig, TrainConfig
from relax_actor.trainers.base import TrainSequence
from relax_actor.trainers.torch_backend import TorchBackend


@pytest.fixture
def own_algorithms():
    """Let torch choose its algorithms again afterwards."""
    yield
    torch.use_deterministic_algorithms(mode=False)


def batch(seed: int, vocabulary: int) -> list[TrainSequence]:
    """Return 32 samples of 20 to 100 tokens, with advantages of both signs."""
    rng = np.random.default_rng(seed)
    return [
        TrainSequence(
            prompt=rng.integers(3, vocabulary, 16, dtype=np.int32),
            response=rng.integers(3, vocabulary, length := int(rng.integers(20, 100)), dtype=np.int32),
            rollout_logprobs=np.full(length, -2.0, np.float32),
            advantage=(-1.0) ** number,
        )
        for number in range(32)
    ]


@pytest.mark.gpu(1)
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("own_algorithms")
def test_the_same_batches_give_the_same_weights_on_a_gpu(tiny_model):
    found = []
    for _ in range(2):
        backend = TorchBackend(
            ModelConfig(path=str(tiny_model.path), dtype="bfloat16"),
            TrainConfig(learning_rate=1e-3, deterministic=True),
            total_steps=8,
            device="cuda",
        )
        for seed in range(8):
            sequences = batch(seed, tiny_model.vocab_size)
            backend.begin_update(
                total_tokens=sum(len(each.response) for each in sequences), total_sequences=len(sequences)
            )
            backend.accumulate(sequences)
            backend.finish_update()
        found.append({name: value.detach().cpu().clone() for name, value in backend.weights()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
