"""Do some of the tests on one engine, in this process: `python -m actors.harness ray --tests a,b`.

The tests are written once for all engines. Their letters: a spawn, b one call after another, c many in flight,
d an array out and back, e one array to four actors, f a pending call when its actor is killed (fbig: with
2 GiB touched), g a restart, i an orderly stop, k a grandchild when its parent is killed, s a hung actor,
x errors, orphan: the parent kills this process and watches. What is measured goes to `--out` as JSON.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors import procfs, work
from actors.engine import MODULES, Engine, load

Facts = dict[str, Any]
"""By metric: a number, a list of samples, or a text."""

now = time.perf_counter

READY = "READY"
GONE_DEADLINE_S = 30.0
GRANDCHILD_DEADLINE_S = 5.0
HUNG_CALL_S = 3.0


def main() -> None:
    """Run the tests asked for; an error of one is a fact, and the next is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=sorted(MODULES))
    parser.add_argument("--tests", required=True, help="letters, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    engine = load(args.engine)
    with asyncio.Runner(loop_factory=engine.loop) as runner:
        runner.run(_run(engine, args.tests.split(","), args.out))


async def _run(engine: Engine, tests: list[str], out: Path) -> None:
    await engine.start()
    facts: Facts = {"version": engine.version, "errors": {}}
    for test in tests:
        try:
            await TESTS[test](engine, facts)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is its result
            facts["errors"][test] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{test}: {facts['errors'][test]}", file=sys.stderr, flush=True)
    out.write_text(json.dumps(facts))
    if "i" not in tests:
        await engine.stop()


async def spawn(engine: Engine, facts: Facts) -> None:
    """One actor, four times; then sixteen together, and what memory one of them takes."""
    times = []
    for _ in range(4):
        started = now()
        actors = await engine.spawn(1)
        await engine.call(actors[0], "ping")
        times.append(now() - started)
        await _drop(engine, actors)
    facts["a_spawn1_first_s"], facts["a_spawn1_s"] = times[0], times[1:]
    started = now()
    actors = await engine.spawn(work.SPAWNED_TOGETHER)
    pids = await _all(engine, actors, "ping")
    facts["a_spawn16_s"] = now() - started
    if len(set(pids)) != work.SPAWNED_TOGETHER:
        raise RuntimeError(f"{work.SPAWNED_TOGETHER} actors share {len(set(pids))} processes")
    facts["a_actor_rss_mib"], facts["a_actor_pss_mib"] = procfs.rss_pss_mib(pids[3])
    await _drop(engine, actors)


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
    await _drop(engine, actors)


async def throughput(engine: Engine, facts: Facts) -> None:
    """Tiny calls, 256 in flight, to one actor and to eight."""
    actors = await engine.spawn(work.FAN_OUT)
    await _all(engine, actors, "ping")
    await _warm_up(engine, actors[0])
    await _pipeline(engine, actors[:1], work.PIPELINED_CALLS // 5)
    cpu_s = procfs.tree_cpu_s()
    facts["c_1to1_per_s"] = await _pipeline(engine, actors[:1], work.PIPELINED_CALLS)
    facts["c_1to1_cpu_us"] = (procfs.tree_cpu_s() - cpu_s) / work.PIPELINED_CALLS * 1e6
    await _pipeline(engine, actors, work.PIPELINED_CALLS // 5)
    facts["c_1to8_per_s"] = await _pipeline(engine, actors, work.PIPELINED_CALLS)
    await _drop(engine, actors)


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
    await _drop(engine, actors)


async def broadcast(engine: Engine, facts: Facts) -> None:
    """256 MiB to four actors; the first time, with its fresh pages, is left out."""
    actors = await engine.spawn(work.BROADCAST_ACTORS)
    await _all(engine, actors, "ping")
    array = work.doubles(work.BROADCAST_BYTES)
    expected, times = [work.touch(array)] * work.BROADCAST_ACTORS, []
    for _ in range(work.BROADCAST_REPEATS):
        started = now()
        sums = await engine.broadcast(actors, array)
        times.append(now() - started)
        if sums != expected:
            raise RuntimeError("the actors did not read what was sent")
    facts["e_first_s"], facts["e_bcast_s"] = times[0], times[1:]
    await _drop(engine, actors)


async def detection(engine: Engine, facts: Facts) -> None:
    """SIGKILL to an actor that runs a call: how long until the call fails?"""
    facts["f_detect_s"] = []
    for wait_s in engine.kill_waits_s:
        await _killed_in_a_call(engine, facts, "f", held_gib=0.0, wait_s=wait_s)


async def detection_of_a_big_one(engine: Engine, facts: Facts) -> None:
    """The same with 2 GiB touched, which the kernel frees before the process is gone."""
    facts["fbig_detect_s"] = []
    for _ in range(engine.big_kills):
        await _killed_in_a_call(engine, facts, "fbig", held_gib=work.HELD_GIB, wait_s=0.5)


async def restart(engine: Engine, facts: Facts) -> None:
    """SIGKILL to an idle actor: how long until its next incarnation answers?"""
    facts["g_restart_s"] = []
    for _ in range(engine.restarts):
        actors = await engine.spawn(1, restartable=True)
        pid = await engine.call(actors[0], "ping")
        await asyncio.sleep(0.5)
        started = now()
        os.kill(pid, signal.SIGKILL)
        await engine.revived(actors[0], pid)
        facts["g_restart_s"].append(now() - started)
        await _drop(engine, actors)


async def orderly_stop(engine: Engine, facts: Facts) -> None:
    """Stop the engine with four idle actors; nothing may be left. No test can follow."""
    await _all(engine, await engine.spawn(4), "ping")
    processes = procfs.descendants()
    started = now()
    await engine.stop()
    facts["i_stop_call_s"] = now() - started
    gone = procfs.wait_gone(processes, started, GONE_DEADLINE_S)
    facts["i_stop_s"] = max(gone.values(), default=0.0)
    facts["i_left"] = len(processes) - len(gone)


async def grandchild(engine: Engine, facts: Facts) -> None:
    """SIGKILL to an actor that has started a process of its own."""
    actors = await engine.spawn(1)
    pid, child = [await engine.call(actors[0], method) for method in ("ping", "child")]
    started = now()
    os.kill(pid, signal.SIGKILL)
    gone = await asyncio.to_thread(procfs.wait_gone, [child], started, GRANDCHILD_DEADLINE_S)
    if child in gone:
        facts["k_grandchild_s"] = gone[child]
    else:
        facts["k_note"] = f"alive after {GRANDCHILD_DEADLINE_S:g} s"
        os.kill(child, signal.SIGKILL)


async def hung(engine: Engine, facts: Facts) -> None:
    """SIGSTOP to an actor: how much later than its deadline does a call end?"""
    actors = await engine.spawn(1)
    pid = await engine.call(actors[0], "ping")
    os.kill(pid, signal.SIGSTOP)
    started = now()
    try:
        await engine.call_within(HUNG_CALL_S, actors[0], "ping")
    except Exception as error:  # noqa: BLE001 - each engine has its own
        facts["s_error"] = type(error).__name__
    finally:
        facts["s_late_s"] = now() - started - HUNG_CALL_S
        os.kill(pid, signal.SIGKILL)


async def errors(engine: Engine, facts: Facts) -> None:
    """Is an error still of its type here? Does one that cannot be sent take the actor with it?"""
    actors = await engine.spawn(1)
    for method in ("boom", "boom_unsendable"):
        try:
            await engine.wait(engine.submit(actors[0], method), 20.0)
        except Exception as error:  # noqa: BLE001 - it is the result
            facts[f"x_{method}"] = f"{type(error).__name__}, is a ValueError: {isinstance(error, ValueError)}"
    try:
        await engine.call_within(5.0, actors[0], "ping")
        facts["x_actor_after"] = "alive"
    except Exception as error:  # noqa: BLE001 - as above
        facts["x_actor_after"] = type(error).__name__


async def orphan(engine: Engine, facts: Facts) -> None:
    """Four actors, one busy, one with a process of its own; say so and wait to be killed."""
    del facts
    actors = await engine.spawn(4)
    await _all(engine, actors, "ping")
    await engine.call(actors[1], "child")
    busy = engine.submit(actors[0], "sleep", 600.0)
    await asyncio.sleep(1.0)
    print(READY, flush=True)
    await asyncio.sleep(600.0)
    del busy


async def _drop(engine: Engine, actors: list[Any]) -> None:
    await engine.drop(actors)
    await asyncio.sleep(engine.settle_s)


async def _all(engine: Engine, actors: list[Any], method: str) -> list[Any]:
    pending = [engine.submit(actor, method) for actor in actors]
    return [await engine.wait(each) for each in pending]


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


async def _killed_in_a_call(
    engine: Engine, facts: Facts, test: str, *, held_gib: float, wait_s: float
) -> None:
    actors = await engine.spawn(1)
    pid = await engine.call(actors[0], "ping")
    if held_gib:
        await engine.call(actors[0], "hold", held_gib)
    pending = engine.submit(actors[0], "sleep", 120.0)
    await asyncio.sleep(wait_s)
    started = now()
    os.kill(pid, signal.SIGKILL)
    try:
        await engine.wait(pending, 60.0)
    except Exception as error:  # noqa: BLE001 - each engine has its own
        facts[f"{test}_detect_s"].append(now() - started)
        facts[f"{test}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
    await asyncio.to_thread(procfs.wait_gone, [pid], started, GONE_DEADLINE_S)
    await _drop(engine, actors)


TESTS: dict[str, Callable[[Engine, Facts], Awaitable[None]]] = {
    "a": spawn,
    "b": latency,
    "c": throughput,
    "d": arrays,
    "e": broadcast,
    "f": detection,
    "fbig": detection_of_a_big_one,
    "g": restart,
    "i": orderly_stop,
    "k": grandchild,
    "s": hung,
    "x": errors,
    "orphan": orphan,
}


if __name__ == "__main__":
    main()
