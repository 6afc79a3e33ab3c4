"""Routing replay: how far trainer and rollout are apart with and without, and what it costs.

python benchmarks/r3.py
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import spread, write
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from relax_actor.config import ModelConfig, TrainConfig
from relax_actor.engines.base import Completion, Request, SamplingParams
from relax_actor.engines.transformers_engine import TransformersEngine
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex
from relax_actor.rl.routing import RouteLayout, layout_of, pack
from relax_actor.trainers.base import MicrobatchStats, TrainSequence
from relax_actor.trainers.torch_backend import TorchBackend

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}
GROUPS, SAMPLES, PROMPT_TOKENS = 4, 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args)
    write("r3", figures)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Sample once a dtype, then train on it both ways in turns."""
    config = Qwen3MoeConfig(**MODEL)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    layout = layout_of(config.to_dict())
    parameters = sum(value.numel() for _, value in backend(folder, "float32", r3=False).weights())
    return {
        "workload": f"random Qwen3-MoE of {parameters / 1e6:.1f} M parameters, {layout.experts} experts, "
        f"{layout.top_k} a token, {layout.layers} layers; {GROUPS} prompts of {PROMPT_TOKENS} tokens, "
        f"{SAMPLES} samples of {args.tokens} tokens each; one thread; processor seconds",
        "stored_bytes_per_token": len(layout.moe_layers) * layout.top_k * layout.dtype.itemsize,
        **{dtype: compare(folder, layout, dtype, args) for dtype in ("bfloat16", "float32")},
    }


def compare(folder: Path, layout: RouteLayout, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return mismatch and step time with and without, and what recording costs while sampling."""
    plain, replayed = (backend(folder, dtype, r3=r3) for r3 in (False, True))
    check = backend(folder, dtype, r3=True, mode="check")
    done, sampling = sample_in_turns(folder, plain, dtype, args)
    batch = [sequence(each, layout) for each in done]
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(args.rounds):
        for name, trainer in (("without", plain), ("with", replayed)):
            times[name].append(timed(lambda trainer=trainer: forward_backward(trainer, batch)))
    without, with_r3 = (mismatch(forward_backward(trainer, batch)) for trainer in (plain, replayed))
    compared = forward_backward(check, batch)
    return {
        "mismatch_without": without,
        "mismatch_with": with_r3,
        "mismatch_abs_ratio": round(with_r3["abs"] / without["abs"], 4),
        "routed_elsewhere_frac": round(compared.routed_apart / compared.routed_places, 5),
        "step_without_s": spread(times["without"]),
        "step_with_s": spread(times["with"]),
        "step_ratio": ratio(times["with"], times["without"]),
        "sampling_plain_s": spread(sampling["plain"]),
        "sampling_recorded_s": spread(sampling["recorded"]),
        "recording_ratio": ratio(sampling["recorded"], sampling["plain"]),
    }


def backend(folder: Path, dtype: Any, *, r3: bool, mode: Any = "async") -> TorchBackend:
    """Return a trainer of the same weights."""
    train = TrainConfig(use_r3=r3, r3_replay_mode=mode, r3_tolerance_frac=1.0)
    return TorchBackend(ModelConfig(path=str(folder), dtype=dtype), train, total_steps=1)


def sample_in_turns(
    folder: Path, trainer: TorchBackend, dtype: str, args: argparse.Namespace
) -> tuple[list[Completion], dict[str, list[float]]]:
    """Sample the same requests with and without recording; return the recorded ones, and the times."""
    engines = {
        name: engine(folder, trainer, dtype, record=name == "recorded") for name in ("plain", "recorded")
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    done: list[Completion] = []
    for _ in range(args.rounds):
        for name, each in engines.items():
            started = time.process_time()
            done = sampled(each, args.tokens)
            times[name].append(time.process_time() - started)
    return done, times


def engine(folder: Path, trainer: TorchBackend, dtype: str, *, record: bool) -> TransformersEngine:
    """Return an engine with the trainer's weights."""
    made = TransformersEngine(folder, seed=1, slots=GROUPS * SAMPLES, dtype=dtype, record_routes=record)
    made.install(PolicyVersion(0), trainer.weights())
    return made


def sampled(engine: TransformersEngine, tokens: int) -> list[Completion]:
    """Sample all requests to the end, in order."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=tokens)
    prompts = [tuple(rng.integers(0, MODEL["vocab_size"], PROMPT_TOKENS).tolist()) for _ in range(GROUPS)]
    engine.submit(
        [
            Request(group_id=GroupId(group), sample_index=SampleIndex(index), prompt=prompt, params=params)
            for group, prompt in enumerate(prompts)
            for index in range(SAMPLES)
        ]
    )
    done: list[Completion] = []
    while engine.in_flight:
        done += engine.step()
    return sorted(done, key=lambda completion: completion.request.key)


def sequence(done: Completion, layout: RouteLayout) -> TrainSequence:
    """Return what the trainer gets of a sample."""
    return TrainSequence(
        prompt=np.array(done.request.prompt, np.int32),
        response=done.tokens,
        rollout_logprobs=done.logprobs,
        advantage=1.0 if done.request.sample_index % 2 else -1.0,
        key=done.request.key,
        versions=done.versions,
        routed_experts=pack(done.routed_experts, layout, done.request.key),
    )


def forward_backward(trainer: TorchBackend, batch: list[TrainSequence]) -> MicrobatchStats:
    """Do a step's work without changing the weights."""
    trainer.begin_update(total_tokens=sum(len(each.response) for each in batch), total_sequences=len(batch))
    return trainer.accumulate(batch)


def mismatch(stats: MicrobatchStats) -> dict[str, float]:
    """Return how far trainer and rollout are apart."""
    return {
        "abs": stats.mismatch_abs_sum / stats.tokens,
        "k3": stats.mismatch_k3_sum / stats.tokens,
        "max_ratio": round(stats.max_ratio, 5),
    }


def timed(work: Callable[[], object]) -> float:
    """Return its processor seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


def ratio(one: list[float], other: list[float]) -> float:
    """Return the ratio of the medians."""
    return round(statistics.median(one) / statistics.median(other), 4)


if __name__ == "__main__":
    main()
