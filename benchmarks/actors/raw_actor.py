"""The far side of the raw floor: a forked process, a ZeroMQ socket drained by its FD, no engine.

`python -m actors.raw_actor` is the warm process: for each address on its standard input it forks one and
prints its pid. A call is MessagePack [id, method, arguments]; arrays are in shared files that stay mapped.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import msgpack
import numpy as np
import zmq

from actors.work import Doubles, Work, touch


class RawWork(Work):
    """The work, with arrays in shared memory."""

    def __init__(self) -> None:
        self._segments: dict[str, Doubles] = {}

    def consume_shared(self, path: str) -> int:
        return touch(self._segment(path))

    def give_shared(self, path: str) -> None:
        self._segment(path)[:] = self.array

    def _segment(self, path: str) -> Doubles:
        if path not in self._segments:
            self._segments[path] = np.memmap(path, dtype=np.float64, mode="r+")
        return self._segments[path]


def main() -> None:
    """Fork an actor a line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(_serve(line.strip()))
        print(pid, flush=True)


async def _serve(address: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    work = RawWork()

    def drain() -> None:
        while True:
            try:
                sender, body = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            socket.send_multipart([sender, _answer(work, body)], zmq.NOBLOCK)

    loop = asyncio.get_running_loop()
    loop.add_reader(int(socket.getsockopt(zmq.FD)), drain)
    loop.call_soon(drain)
    await asyncio.Event().wait()


def _answer(work: Work, body: bytes) -> bytes:
    call, method, arguments = msgpack.unpackb(body)
    value: Any = getattr(work, method)(*arguments)
    answer: bytes = msgpack.packb([call, value])
    return answer


if __name__ == "__main__":
    main()
