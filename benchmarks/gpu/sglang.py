"""The engine `sglang` on a GPU: its start, its throughput, its versions and its determinism.

    RELAX_ACTOR_SGLANG_PYTHON=python3 python benchmarks/gpu/sglang.py OUT.json [--shape 0.6b] [--parts ...]

`start`: what a start consists of, the second time with everything cached. `throughput`: the same prompts
through the engine and straight to its server, in turn. `versions`: an install in the middle of 32 requests,
and the log-probs of every token by both versions; `retract`: the same in that mode. `deterministic`: the
same samples after a kill, in another order and half of them continued. Every part runs whatever became of
the others.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from common import circumstances, spread  # noqa: E402
from parts import Parts, cuda_devices  # noqa: E402
from sglang_scenes import Told, logprobs, model_folder, requests, start_engine, weights  # noqa: E402
from sglang_ways import bare, finished, settle  # noqa: E402

from relax_actor.engines.base import Prefix  # noqa: E402

SCALE = 0.6
"""Of the second version's output layer: its log-probs are far from the first one's."""
ROUNDS = 3


def main() -> None:
    args = parsed()
    result = circumstances("gpu-sglang") | {"gpus": cuda_devices(), "shape": args.shape}
    parts = Parts(result, args.out)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args)
        settle()
        for name in args.parts.split(","):
            parts.run(name, lambda name=name: result.update({name: getattr(bench, name)()}))
        bench.close()
    print(json.dumps(result))


class Bench:
    """A model, and one server that several parts use."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.model = model_folder(folder / "model", args.shape)
        self.told = Told()
        self.engine: Any = None

    def start(self) -> dict[str, Any]:
        """Start three times; the first one also fills the page cache, and whatever is compiled."""
        rows = []
        for _ in range(self.args.starts):
            self.close()
            self.open()
            started = self.told.last("engine_started")
            since = time.monotonic()
            self.engine.install(1, weights(self.model))
            installed = time.monotonic()
            finished(self.engine, requests(1, prompt_tokens=8, new_tokens=1))
            rows.append(
                {
                    "seconds": started["seconds"],
                    "phases": started["phases"],
                    "first_install_s": round(installed - since, 4),
                    "first_sampled_token_s": round(time.monotonic() - installed, 4),
                    "sglang": started["sglang"],
                }
            )
        return {"starts": rows}

    def throughput(self) -> dict[str, Any]:
        """Return tokens a second by both ways, and their ratio."""
        self.open(at=1)
        count, tokens = (512, 256) if self.args.shape != "tiny" else (48, 24)
        ways: dict[str, list[float]] = {"engine": [], "bare": []}
        for number in range(ROUNDS + 1):
            batch = requests(count, prompt_tokens=96, new_tokens=tokens, first=1000 * (number + 1))
            for way in random.sample(list(ways), 2):
                since = time.monotonic()
                if way == "engine":
                    done = finished(self.engine, batch)
                    check(all(len(each.tokens) == tokens for each in done), "a sample is too short")
                else:
                    asyncio.run(bare(self.told.last("engine_started")["url"], batch, self.args.slots))
                if number:  # the first round warms up
                    ways[way].append(count * tokens / (time.monotonic() - since))
        ratios = [mine / theirs for mine, theirs in zip(ways["engine"], ways["bare"], strict=True)]
        return {
            "requests": count,
            "new_tokens": tokens,
            "slots": self.args.slots,
            "engine_tokens_s": spread(ways["engine"]),
            "bare_tokens_s": spread(ways["bare"]),
            "ratio": spread(ratios),
        }

    def retract(self) -> dict[str, Any]:
        """Let an install send the requests back to the queue: every token is then exactly of one version."""
        self.close()
        try:
            return self.versions(update_mode="retract")
        finally:
            self.close()

    def versions(self, update_mode: str = "auto") -> dict[str, Any]:
        """Install in the middle of 32 requests, then ask both versions about every token."""
        self.open(at=1, update_mode=update_mode)
        new_tokens = 1024 if self.args.shape != "tiny" else 200
        batch = requests(32, prompt_tokens=64, new_tokens=new_tokens, first=90_000)
        self.engine.submit(batch)
        time.sleep(1.0 if self.args.shape != "tiny" else 0.3)
        version = self.engine.version + 1
        self.engine.install(version, weights(self.model, SCALE))
        done = finished(self.engine, [], wait_for=len(batch))
        updated = self.told.last("engine_updated")
        gaps = {"own": [], "other": []}
        wrong = tokens = 0
        for each in done:
            both = [logprobs(self.model, each.request.prompt, each.tokens, scale) for scale in (1.0, SCALE)]
            is_new = (each.versions == version).astype(int)
            stacked = np.abs(np.stack(both) - each.logprobs)
            own, other = (np.take_along_axis(stacked, index[None], 0)[0] for index in (is_new, 1 - is_new))
            gaps["own"] += own.tolist()
            gaps["other"] += other.tolist()
            tokens += len(own)
            wrong += borders_are_wrong(stacked, is_new)
        self.engine.install(version + 1, weights(self.model))
        return {
            "mode": updated["mode"],
            "update": {
                key: updated[key] for key in ("seconds", "stopped_s", "aborted", "replayed_tokens", "nbytes")
            },
            "tokens": tokens,
            "tokens_before_update": int(sum((each.versions < version).sum() for each in done)),
            "finish_reasons": sorted({each.finish_reason.value for each in done}),
            "median_gap_to_own_version": statistics.median(gaps["own"]),
            "median_gap_to_other_version": statistics.median(gaps["other"]),
            "samples_with_a_border_elsewhere": wrong,
        }

    def deterministic(self) -> dict[str, Any]:
        """The same samples from a server that was killed, in another order, half of them continued."""
        self.close()
        count, tokens = (24, 128) if self.args.shape != "tiny" else (6, 16)
        batch = requests(count, prompt_tokens=40, new_tokens=tokens, first=500)
        self.open(at=1, deterministic=True)
        first = {done.request.key: done for done in finished(self.engine, batch)}
        again = {done.request.key: done for done in finished(self.engine, list(reversed(batch)))}
        os.kill(self.told.last("engine_started")["server_pid"], signal.SIGKILL)
        self.close()
        self.open(at=1, deterministic=True)
        cut = tokens // 3
        mixed = [
            continued(request, first[request.key], cut) if n % 2 else request
            for n, request in enumerate(batch)
        ]
        third = {done.request.key: done for done in finished(self.engine, random.sample(mixed, count))}
        return {
            "samples": count,
            "same_in_another_order": equal(first, again),
            "same_after_a_kill_and_continued": equal(first, third),
            "first_differing_token": differing(first, third),
        }

    def open(self, *, at: int = 0, **changes: Any) -> None:
        """Start the engine, unless it is there; install a version."""
        if self.engine is None:
            self.engine = start_engine(
                self.folder / "model",
                self.folder / "sglang.log",
                told=self.told,
                slots=self.args.slots,
                **changes,
            )
        if at and self.engine.version is None:
            self.engine.install(at, weights(self.model))

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
            log = self.args.out.with_suffix(".log")
            log.write_bytes((self.folder / "sglang.log").read_bytes()[-(1 << 20) :])


def check(holds: bool, fact: str) -> None:
    if not holds:
        raise RuntimeError(fact)


def borders_are_wrong(gaps: Any, is_new: Any) -> bool:
    """Whether another place of the border would explain the log-probs clearly better; [2, tokens]."""
    totals = np.concatenate([[0.0], np.cumsum(gaps[0])]) + (
        gaps[1].sum() - np.concatenate([[0.0], np.cumsum(gaps[1])])
    )
    border = len(is_new) - int(is_new.sum())
    return bool(totals[border] > totals.min() + 1.0)


def continued(request: Any, done: Any, cut: int) -> Any:
    """Return a request that goes on from the first tokens of a sample."""
    prefix = Prefix(
        tokens=tuple(done.tokens[:cut].tolist()),
        logprobs=tuple(done.logprobs[:cut].tolist()),
        versions=tuple(done.versions[:cut].tolist()),
    )
    return msgspec.structs.replace(request, prefix=prefix)


def equal(one: dict[Any, Any], other: dict[Any, Any]) -> int:
    """Return how many samples are the same."""
    return sum(one[key].tokens.tolist() == other[key].tokens.tolist() for key in one)


def differing(one: dict[Any, Any], other: dict[Any, Any]) -> list[int]:
    """Return where samples begin to differ."""
    return [
        int(np.argmax(one[key].tokens != other[key].tokens))
        for key in one
        if one[key].tokens.tolist() != other[key].tokens.tolist()
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=("tiny", "0.6b"), default="0.6b")
    parser.add_argument("--parts", default="start,throughput,versions,deterministic")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--starts", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
