"""The tests of calls and what they carry: spawning, latency, throughput, arrays."""

import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from actors import procfs, work
from actors.engine import Engine, Facts

now = time.perf_counter


async def spawn(engine: Engine, facts: Facts) -> None:
    """One actor, four times; then sixteen together, and what memory one of them takes."""
    times = []
    for _ in range(4):
        started = now()
        actors = await engine.spawn(1)
        await engine.call(actors[0], "ping")
        times.append(now() - started)
        await engine.dismiss(actors)
    facts["a_spawn1_first_s"], facts["a_spawn1_s"] = times[0], times[1:]
    started = now()
    actors = await engine.spawn(work.SPAWNED_TOGETHER)
    pids = await engine.call_each(actors, "ping")
    facts["a_spawn16_s"] = now() - started
    if len(set(pids)) != work.SPAWNED_TOGETHER:
        raise RuntimeError(f"{work.SPAWNED_TOGETHER} actors share {len(set(pids))} processes")
    facts["a_actor_rss_mib"], facts["a_actor_pss_mib"] = procfs.rss_pss_mib(pids[3])
    await engine.dismiss(actors)


async def latency(engine: Engine, facts: Facts) -> None:
    """Tiny calls, one after another."""
    actors = await engine.spawn(1)
    await _warm_up(engine, actors[0])
    times, cpu_s = [], procfs.tree_cpu_s()
    for value in range(work.LATENCY_CALLS):
        started = now()
        await engine.wait(engine.submit(actors[0], "echo", value))
        times.append(now() - started)
    facts["b_cpu_us"] = (procfs.tree_cpu_s() - cpu_s) / work.LATENCY_CALLS * 1e6
    facts["b_p50_us"] = statistics.median(times) * 1e6
    facts["b_p99_us"] = statistics.quantiles(times, n=100)[98] * 1e6
    await engine.dismiss(actors)


async def throughput(engine: Engine, facts: Facts) -> None:
    """Tiny calls, 256 in flight, to one actor and to eight."""
    actors = await engine.spawn(work.FAN_OUT)
    await engine.call_each(actors, "ping")
    await _warm_up(engine, actors[0])
    await _pipeline(engine, actors[:1], work.PIPELINED_CALLS // 5)
    cpu_s = procfs.tree_cpu_s()
    facts["c_1to1_per_s"] = await _pipeline(engine, actors[:1], work.PIPELINED_CALLS)
    facts["c_1to1_cpu_us"] = (procfs.tree_cpu_s() - cpu_s) / work.PIPELINED_CALLS * 1e6
    await _pipeline(engine, actors, work.PIPELINED_CALLS // 5)
    facts["c_1to8_per_s"] = await _pipeline(engine, actors, work.PIPELINED_CALLS)
    await engine.dismiss(actors)


async def arrays(engine: Engine, facts: Facts) -> None:
    """64 MiB as an argument, then as a result; each time one read a page at the other end."""
    actors = await engine.spawn(1)
    array = work.doubles(work.ARRAY_BYTES)
    expected = work.touch(array)
    await engine.call(actors[0], "make", work.ARRAY_BYTES)

    async def out() -> int:
        return int(await engine.call(actors[0], "consume", array))

    async def back() -> int:
        return work.touch(await engine.call(actors[0], "give"))

    facts["d_arg_gibps"] = await _rates(out, expected)
    facts["d_ret_gibps"] = await _rates(back, expected)
    await engine.dismiss(actors)


async def broadcast(engine: Engine, facts: Facts) -> None:
    """256 MiB to four actors; the first time, with its fresh pages, is left out."""
    actors = await engine.spawn(work.BROADCAST_ACTORS)
    await engine.call_each(actors, "ping")
    array = work.doubles(work.BROADCAST_BYTES)
    expected, times = [work.touch(array)] * work.BROADCAST_ACTORS, []
    for _ in range(work.BROADCAST_REPEATS):
        started = now()
        sums = await engine.broadcast(actors, array)
        times.append(now() - started)
        if sums != expected:
            raise RuntimeError("the actors did not read what was sent")
    facts["e_first_s"], facts["e_bcast_s"] = times[0], times[1:]
    await engine.dismiss(actors)


async def _warm_up(engine: Engine, actor: Any) -> None:
    for value in range(work.WARM_UP_CALLS):
        await engine.call(actor, "echo", value)


async def _pipeline(engine: Engine, actors: list[Any], calls: int) -> float:
    """Make calls to the actors in turn, a fixed number in flight, first in first out; return calls/s."""
    in_flight: deque[Any] = deque()
    started = now()
    for value in range(calls):
        if len(in_flight) >= work.IN_FLIGHT:
            await engine.wait(in_flight.popleft())
        in_flight.append(engine.submit(actors[value % len(actors)], "echo", value))
    while in_flight:
        await engine.wait(in_flight.popleft())
    return calls / (now() - started)


async def _rates(move: Callable[[], Awaitable[int]], expected: int) -> list[float]:
    """Move the array several times; return GiB/s of each, the first ones left out."""
    rates = []
    for _ in range(work.ARRAY_REPEATS):
        started = now()
        if await move() != expected:
            raise RuntimeError("the array was not what was sent")
        rates.append(work.ARRAY_BYTES / work.GIB / (now() - started))
    return rates[work.ARRAY_WARM_UPS :]
