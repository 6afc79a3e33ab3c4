"""The floor: pyzmq and MessagePack, drained by its FD on both sides; arrays in warm shared memory; pidfds.

No mailbox, no deadlines, no types, no supervision: what the machine and ZeroMQ take by themselves.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from actors import work
from actors.engine import Engine, LoopEngine

RECONNECT_MS = 1
"""libzmq's own 100 ms is what a connect waits that came before the bind."""


class RawActor:
    """One forked process and the caller's socket to it."""

    def __init__(self, pid: int, address: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.add_reader(self.pidfd, self._died)
        self._calls = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._drain_due = False

    def submit(self, method: str, *args: Any) -> "asyncio.Future[Any]":
        self._calls += 1
        future = self._waiting[self._calls] = self._loop.create_future()
        self._socket.send(msgpack.packb([self._calls, method, args]), zmq.NOBLOCK)
        if not self._drain_due:  # the FD is edge-triggered, and a send may eat the edge
            self._drain_due = True
            self._loop.call_soon(self._drain)
        return future

    def close(self) -> None:
        if self.pidfd >= 0:
            os.kill(self.pid, signal.SIGKILL)
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
        self._loop.remove_reader(self._fd)
        self._socket.close(0)

    def _drain(self) -> None:
        self._drain_due = False
        while True:
            try:
                call, value = msgpack.unpackb(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._waiting.pop(call).set_result(value)

    def _died(self) -> None:
        self._loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError(f"process {self.pid} died"))
        self._waiting.clear()


class Raw(LoopEngine):
    """A warm process that forks; what an engine adds is measured against it."""

    version = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    kill_waits_s = (0.3,) * 20
    big_kills = 5
    restarts = 10

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="relax-bench-", dir="/dev/shm"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._segments: dict[str, work.Doubles] = {}
        self._given: dict[asyncio.Future[Any], work.Doubles] = {}
        self._names = 0
        self._zygote: subprocess.Popen[str]

    async def start(self) -> None:
        command = [sys.executable, "-m", "actors.raw_actor"]
        self._zygote = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - it starts once
        (await self.spawn(1))[0].close()  # its imports are done when it has forked

    async def spawn(self, count: int, *, restartable: bool = False) -> list[Any]:
        del restartable  # see `revived`
        return [self._fork() for _ in range(count)]

    def _fork(self) -> RawActor:
        stdin, stdout = self._zygote.stdin, self._zygote.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the warm process has no pipes")
        address = f"ipc://{self._path('s')}"
        stdin.write(f"{address}\n")
        stdin.flush()
        return RawActor(int(stdout.readline()), address, self._context)

    def submit(self, actor: RawActor, method: str, *args: Any) -> Any:
        if method == "consume":
            path, segment = self._segment(args[0].nbytes)
            np.copyto(segment, args[0])
            return actor.submit("consume_shared", path)
        if method == "give":
            path, segment = self._segment(work.ARRAY_BYTES)
            future = actor.submit("give_shared", path)
            self._given[future] = segment
            return future
        return actor.submit(method, *args)

    async def wait(self, pending: Any, timeout_s: float | None = None) -> Any:
        value = await (pending if timeout_s is None else asyncio.wait_for(pending, timeout_s))
        return self._given.pop(pending, value)  # a given array is read in place

    async def broadcast(self, actors: list[Any], array: Any) -> list[int]:
        path, segment = self._segment(array.nbytes)
        np.copyto(segment, array)
        pending = [actor.submit("consume_shared", path) for actor in actors]
        return [await each for each in pending]

    async def revived(self, actor: RawActor, dead: int) -> None:
        """Hear of the death by pidfd, then fork anew."""
        while actor.pidfd >= 0:  # noqa: ASYNC110 - an event would cost the same turn of the loop
            await asyncio.sleep(0)  # lets the loop look at the pidfd
        new = self._fork()
        if await self.call(new, "ping") == dead:
            raise RuntimeError("the dead one answered")
        new.close()

    async def drop(self, actors: list[Any]) -> None:
        for actor in actors:
            actor.close()

    async def stop(self) -> None:
        self._zygote.kill()
        self._zygote.wait()
        shutil.rmtree(self._folder)

    def _segment(self, nbytes: int) -> tuple[str, work.Doubles]:
        """Return the one segment of this size; warm from its second use on."""
        path = str(self._folder / f"a{nbytes}")
        if path not in self._segments:
            self._segments[path] = np.memmap(path, dtype=np.float64, mode="w+", shape=(nbytes // 8,))
        return path, self._segments[path]

    def _path(self, prefix: str) -> Path:
        self._names += 1
        return self._folder / f"{prefix}{self._names}"


def engine(_name: str) -> Engine:
    return Raw()
