"""The tests of what goes wrong or ends: kills, restarts, stops, hangs, errors."""

import os
import signal
import time

from actors import procfs, work
from actors.engine import Engine, Facts

now = time.perf_counter

READY = "READY"
GONE_DEADLINE_S = 30.0
GRANDCHILD_DEADLINE_S = 5.0
HUNG_CALL_S = 3.0


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
        await engine.pause(0.5)
        started = now()
        os.kill(pid, signal.SIGKILL)
        await engine.revived(actors[0], pid)
        facts["g_restart_s"].append(now() - started)
        await engine.dismiss(actors)


async def orderly_stop(engine: Engine, facts: Facts) -> None:
    """Stop the engine with four idle actors; nothing may be left. No test can follow."""
    await engine.call_each(await engine.spawn(4), "ping")
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
    gone = procfs.wait_gone([child], started, GRANDCHILD_DEADLINE_S)
    facts["k_left"] = 1 - len(gone)
    if child in gone:
        facts["k_grandchild_s"] = gone[child]
    else:
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
    await engine.call_each(actors, "ping")
    await engine.call(actors[1], "child")
    busy = engine.submit(actors[0], "sleep", 600.0)
    await engine.pause(1.0)
    print(READY, flush=True)
    await engine.pause(600.0)
    del busy


async def _killed_in_a_call(
    engine: Engine, facts: Facts, test: str, *, held_gib: float, wait_s: float
) -> None:
    actors = await engine.spawn(1)
    pid = await engine.call(actors[0], "ping")
    if held_gib:
        await engine.call(actors[0], "hold", held_gib)
    pending = engine.submit(actors[0], "sleep", 120.0)
    await engine.pause(wait_s)
    started = now()
    os.kill(pid, signal.SIGKILL)
    try:
        await engine.wait(pending, 60.0)
    except Exception as error:  # noqa: BLE001 - each engine has its own
        facts[f"{test}_detect_s"].append(now() - started)
        facts[f"{test}_error"] = type(error).__name__
    procfs.wait_gone([pid], started, GONE_DEADLINE_S)
    await engine.dismiss(actors)
