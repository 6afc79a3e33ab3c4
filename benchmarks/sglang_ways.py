"""Two ways of having the same prompts sampled by a server: through the engine, and straight to it."""

import asyncio
import gc
import time
from typing import Any

import aiohttp


def settle() -> None:
    """Have what is imported looked at by no collection of garbage any more, as it is in every actor.

    A zygote does so before it forks.
    """
    gc.collect()
    gc.freeze()


def finished(engine: Any, batch: list[Any], *, wait_for: int = 0) -> list[Any]:
    """Run requests through the engine, as the rollout does, and return what became of them."""
    todo, done = list(batch), []
    want = len(batch) + wait_for
    while len(done) < want:
        if todo and engine.free_slots:
            room = engine.free_slots
            engine.submit(todo[:room])
            todo = todo[room:]
        got = engine.step()
        done += got
        if not got:
            time.sleep(0.001)
    return done


async def bare(url: str, batch: list[Any], slots: int) -> None:
    """Send the same requests straight to the server."""
    gate = asyncio.Semaphore(slots)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=600)
    ) as session:

        async def one(request: Any) -> None:
            sampling = {
                "max_new_tokens": request.params.max_new_tokens,
                "temperature": 1.0,
                "ignore_eos": True,
            }
            body = {
                "input_ids": list(request.prompt),
                "sampling_params": sampling,
                "return_logprob": True,
                "extra_key": "bare",
            }
            async with gate, session.post(f"{url}/generate", json=body) as answer:
                if answer.status != 200:
                    raise RuntimeError(await answer.text())
                await answer.json()

        await asyncio.gather(*(one(request) for request in batch))
