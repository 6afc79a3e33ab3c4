"""What an answer of SGLang costs on its way through the engine, beside a plain client: no GPU, no SGLang.

    python benchmarks/sglang_answers.py [--rounds 7]

A stand-in for the server holds requests until `--slots` of them have come, waits, and answers all at once
with as many tokens and log-probs as SGLang would: the worst case, where nothing else is to be done meanwhile.
What a wave takes beyond that wait is what the GPU would idle; processor time is of this process alone.
Both ways are measured as in an actor, whose garbage collections pass over what was imported (`settled`), and
as in a program that leaves them as they are (`unsettled`), all four in turns.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from aiohttp import web  # noqa: E402
from common import spread, write  # noqa: E402
from sglang_scenes import requests  # noqa: E402
from sglang_ways import bare, finished, settle  # noqa: E402

from relax_actor.engines.running import admitted  # noqa: E402
from relax_actor.engines.sglang.client import Client  # noqa: E402
from relax_actor.engines.sglang.generation import Generation  # noqa: E402
from relax_actor.engines.sglang.requests import GenerationSettings  # noqa: E402
from relax_actor.ids import PolicyVersion  # noqa: E402

VERSION = PolicyVersion(1)
WAIT_S = 0.05
CONTEXT_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--waves", type=int, default=8, help="in a round")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, args), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        write("sglang-answers", vars(args) | measured(url, args))
    finally:
        server.kill()


def measured(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send the same prompts both ways, in turns."""
    engine = EnginePath(url, args.slots)
    ways = {
        "engine": lambda batch: finished(engine, batch),
        "plain": lambda batch: asyncio.run(bare(url, batch, args.slots)),
    }
    collectors = {"settled": settle, "unsettled": gc.unfreeze}
    turns = [(state, way) for state in collectors for way in ways]
    wave_ms, cpu_ms = defaultdict(list), defaultdict(list)
    count = args.slots * args.waves
    for number in range(args.rounds + 1):
        batch = requests(count, prompt_tokens=96, new_tokens=args.tokens, first=count * number)
        for turn in random.sample(turns, len(turns)):
            collectors[turn[0]]()
            since, cpu = time.monotonic(), time.process_time()
            ways[turn[1]](batch)
            if number:  # the first round warms up
                wave_ms[turn].append(1e3 * ((time.monotonic() - since) / args.waves - WAIT_S))
                cpu_ms[turn].append(1e3 * (time.process_time() - cpu) / count)
    return {
        state: {
            way: {
                "wave_ms": spread(wave_ms[state, way]),
                "cpu_ms_an_answer": spread(cpu_ms[state, way]),
            }
            for way in ways
        }
        for state in collectors
    }


class EnginePath:
    """The engine's way of a request and its answer, without a server of its own."""

    def __init__(self, url: str, slots: int) -> None:
        self._slots = slots
        settings = GenerationSettings(seed=1)
        self._generation = Generation(Client(url), settings, spans=True, on_ready=lambda: None)

    @property
    def free_slots(self) -> int:
        return self._slots - len(self._generation.keys)

    def submit(self, batch: list[Any]) -> None:
        samples = admitted(
            batch,
            free_slots=self.free_slots,
            taken=self._generation.keys,
            context_tokens=CONTEXT_TOKENS,
        )
        self._generation.send(samples, VERSION)

    def step(self) -> list[Any]:
        return self._generation.take(VERSION)


def serve(listener: socket.socket, args: argparse.Namespace) -> None:
    """Answer in waves until killed."""
    body, waiting = answer(args.tokens), []

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        loop = asyncio.get_running_loop()
        waiting.append(loop.create_future())
        mine = waiting[-1]
        if len(waiting) == args.slots:
            loop.call_later(WAIT_S, release, list(waiting))
            waiting.clear()
        await mine
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    web.run_app(app, sock=listener, access_log=None, print=None)


def release(waiting: list["asyncio.Future[None]"]) -> None:
    for each in waiting:
        each.set_result(None)


def answer(tokens: int) -> bytes:
    """Return what SGLang 0.5.23 answers, of its size."""
    rng = random.Random(1)
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 96,
        "weight_version": str(VERSION),
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": tokens}],
        "output_token_logprobs": [[-10 * rng.random(), token, None] for token in ids],
        "completion_tokens": tokens,
        "cached_tokens": 0,
    }
    return json.dumps({"text": "word " * tokens, "output_ids": ids, "meta_info": meta}).encode()


if __name__ == "__main__":
    main()
