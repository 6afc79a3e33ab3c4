"""What does a call cost? Our actors beside the raw ZeroMQ floor, in one run, interleaved.

    python benchmarks/calls.py --rounds 5

The floor is the same pyzmq, drained by its FD on both sides, without mailbox, deadlines or types: one
process that echoes, one that asks.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import zmq
from common import spread, write

from relax_actor import Actor, ChildSpec, Supervisor, SupervisorSpec, endpoint

CALLS = 2000
IN_FLIGHT = 256


class Echo(Actor):
    """Answers."""

    @endpoint
    def echo(self, value: int) -> int:
        return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ours: list[dict[str, float]] = []
    floor: list[dict[str, float]] = []
    spec = SupervisorSpec(id="bench", children=(ChildSpec(id="echo", actor=Echo),))
    with Supervisor(spec) as tree, tempfile.TemporaryDirectory() as folder:
        ref = tree.ref("echo", Echo)
        pids = [os.getpid(), tree.pid("echo") or 0]
        for _ in range(args.rounds):
            ours.append(measure(lambda: ref.ask(Echo.echo, 1).result(), lambda: _burst(ref), pids))
            floor.append(asyncio.run(_raw(Path(folder) / "raw")))
    write(
        "calls",
        {
            "workload": f"{CALLS} calls one after another; {CALLS} with {IN_FLIGHT} in flight",
            "p50_us": {"ours": _of(ours, "p50_us"), "raw_zmq": _of(floor, "p50_us")},
            "pipelined_per_s": {"ours": _of(ours, "per_s"), "raw_zmq": _of(floor, "per_s")},
            "cpu_us_pipelined": {"ours": _of(ours, "cpu_us"), "raw_zmq": _of(floor, "cpu_us")},
            "p50_over_raw": spread(
                [one["p50_us"] / raw["p50_us"] for one, raw in zip(ours, floor, strict=True)]
            ),
        },
    )


def measure(ask: Callable[[], object], burst: Callable[[], object], pids: list[int]) -> dict[str, float]:
    """Time single calls, then a burst; CPU is that of the listed processes."""
    for _ in range(200):
        ask()
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        ask()
        times.append(time.perf_counter() - started)
    before, started = _cpu_s(pids), time.perf_counter()
    burst()
    seconds = time.perf_counter() - started
    return {
        "p50_us": statistics.median(times) * 1e6,
        "per_s": CALLS / seconds,
        "cpu_us": (_cpu_s(pids) - before) / CALLS * 1e6,
    }


def _burst(ref: object) -> None:
    waiting = []
    for number in range(CALLS):
        waiting.append(ref.ask(Echo.echo, number))  # type: ignore[attr-defined]
        if len(waiting) == IN_FLIGHT:
            waiting.pop(0).result()
    for reply in waiting:
        reply.result()


RAW_ECHO = """
import sys, zmq
socket = zmq.Context.instance().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
poller = zmq.Poller()
poller.register(socket.FD, zmq.POLLIN)
while True:
    while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        socket.send_multipart(socket.recv_multipart())
    poller.poll(1000)
"""


async def _raw(path: Path) -> dict[str, float]:
    """Ask a bare echo process with a DEALER that is drained by its FD."""
    address = f"ipc://{path}"
    with subprocess.Popen([sys.executable, "-c", RAW_ECHO, address]) as process:  # noqa: ASYNC220 - before the loop does anything
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        answers = 0

        def drain() -> None:
            nonlocal answers
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                socket.recv_multipart()
                answers += 1
            answered.set()

        loop.add_reader(socket.FD, drain)

        async def ask(window: int) -> None:
            sent = answers
            for _ in range(window):
                socket.send_multipart([b"call", b"1"])
            while answers < sent + window:
                answered.clear()
                drain()
                if answers < sent + window:
                    await answered.wait()

        for _ in range(200):
            await ask(1)
        times = []
        for _ in range(CALLS):
            started = time.perf_counter()
            await ask(1)
            times.append(time.perf_counter() - started)
        pids = [os.getpid(), process.pid]
        before, started = _cpu_s(pids), time.perf_counter()
        for _ in range(CALLS // IN_FLIGHT):
            await ask(IN_FLIGHT)
        seconds, cpu_s = time.perf_counter() - started, _cpu_s(pids) - before
        loop.remove_reader(socket.FD)
        context.destroy(linger=0)
        process.kill()
    done = CALLS // IN_FLIGHT * IN_FLIGHT
    return {
        "p50_us": statistics.median(times) * 1e6,
        "per_s": done / seconds,
        "cpu_us": cpu_s / done * 1e6,
    }


def _cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _of(rounds: list[dict[str, float]], name: str) -> dict[str, float]:
    return spread([each[name] for each in rounds])


if __name__ == "__main__":
    main()
