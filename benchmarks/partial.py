"""A long sample whose rollout died: going on from its last chunk, against sampling it again.

python benchmarks/partial.py
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import spread, write
from transformers import AutoModelForCausalLM, Qwen3Config

from relax_actor.engines.base import Completion, Prefix, Request, SamplingParams
from relax_actor.engines.transformers_engine import TransformersEngine
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex

PROMPT = tuple(range(10, 74))
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--killed-at", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args)
    write("partial", figures)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time both ways for both kinds of engine, in turns."""
    config = Qwen3Config(**MODEL)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    weights = list(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    figures: dict[str, Any] = {
        "workload": f"one sample of {args.tokens} tokens after a prompt of {len(PROMPT)}, killed at "
        f"{args.killed_at}; Qwen3 of 2 layers, 128 wide, float32, one thread; processor seconds",
    }
    for kind, deterministic in (("batched", False), ("deterministic", True)):
        engine = TransformersEngine(folder, seed=1, slots=2, dtype="float32", deterministic=deterministic)
        engine.install(PolicyVersion(0), weights)
        figures[kind] = compare(engine, args)
    return figures


def compare(engine: TransformersEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Return what each way costs until the sample is where it was, and until it is whole."""
    again: list[tuple[float, float]] = []
    onward: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        whole, times = sample(engine, request(args), args)
        again.append(times)
        prefix = prefix_of(whole, args.killed_at)
        completion, times = sample(engine, request(args, prefix), args)
        onward.append(times)
    same = int((completion.tokens == whole.tokens).sum())
    back = [statistics.median(each[0] for each in times) for times in (again, onward)]
    total = [statistics.median(each[1] for each in times) for times in (again, onward)]
    return {
        "regenerate_until_killed_at_s": spread([each[0] for each in again]),
        "continue_until_killed_at_s": spread([each[0] for each in onward]),
        "regenerate_whole_s": spread([each[1] for each in again]),
        "continue_whole_s": spread([each[1] for each in onward]),
        "lost_work_ratio": round(back[1] / back[0], 4),
        "whole_ratio": round(total[1] / total[0], 4),
        "equal_tokens": same,
        "equal_logprobs_bits": bool((completion.logprobs == whole.logprobs).all()),
    }


def request(args: argparse.Namespace, prefix: Prefix | None = None) -> Request:
    """Return the sample to be made, or to be gone on with."""
    params = SamplingParams(max_new_tokens=args.tokens)
    plain = Request(group_id=GroupId(0), sample_index=SampleIndex(0), prompt=PROMPT, params=params)
    return (
        plain
        if prefix is None
        else Request(
            group_id=plain.group_id,
            sample_index=plain.sample_index,
            prompt=PROMPT,
            params=params,
            prefix=prefix,
        )
    )


def prefix_of(completion: Completion, tokens: int) -> Prefix:
    """Return what the last chunk had."""
    return Prefix(
        tokens=tuple(completion.tokens[:tokens].tolist()),
        logprobs=tuple(completion.logprobs[:tokens].tolist()),
        versions=tuple(completion.versions[:tokens].tolist()),
    )


def sample(
    engine: TransformersEngine, wanted: Request, args: argparse.Namespace
) -> tuple[Completion, tuple[float, float]]:
    """Sample to the end; return processor seconds until more than `killed_at` tokens, and of the whole."""
    started = time.process_time()
    back_s = 0.0
    engine.submit([wanted])
    while True:
        finished = engine.step()
        if not back_s and (finished or engine.lengths()[wanted.key] > args.killed_at):
            back_s = time.process_time() - started
        if finished:
            return finished[0], (back_s, time.process_time() - started)


if __name__ == "__main__":
    main()
