"""Rows from a producer on another host into the queue's memory, beside raw TCP in the same run.

    python benchmarks/remote_rows.py [--rounds 5]

Both hosts are this machine: two node agents, loopback, nothing shared. A round is, in turn, raw TCP (one
process writes the same bytes to another, which reads them into one buffer) and the way of rows: written and
handed over by the producer, stored by the dock, read once by a sink that then frees them. Beside the time it
is measured what processor time all processes take together for a byte, by either way: of that a busy machine
changes less.
"""

import argparse
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import spread, write

from relax_actor import Actor, ChildSpec, Supervisor, SupervisorSpec, endpoint
from relax_actor.homes import LoopHosts
from relax_actor.protocol import TensorRef
from relax_actor.roles.dock import RowDock
from relax_actor.roles.rows import rows_of
from relax_actor.supervision.hosts import Host
from relax_actor.transfer_queue.storage import RowReader
from transport.shm import ShmSpace

ADDRESS = "127.0.0.1"
WINDOW = 4
"""Puts on their way at once."""

KINDS = {"text": (32, 512, 1000), "text_columns": (1, 32 * 512, 1000), "media_10mb": (1, 833_333, 60)}
"""As the loop puts samples, with references for each; the same bytes as a row queue lays them, with one
reference a column; large rows. Rows a put, tokens a row (12 bytes each: token, log-prob, version), puts a
round."""

SENDER = """
import socket, sys, time
data = memoryview(bytearray(int(sys.argv[2])))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as out:
    began = time.process_time()
    for _ in range(int(sys.argv[3])):
        out.sendall(data)
print(time.process_time() - began)
"""


class Sink(Actor):
    """Reads rows on the queue's host, once, and frees them."""

    def __init__(self) -> None:
        self._space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._reader = RowReader(self._space)

    @endpoint
    def take(self, refs: list[TensorRef]) -> float:
        """Return a sum over all arrays; what they are in is freed."""
        arrays = [self._reader.read(ref) for ref in refs]  # all at once, as a trainer has its batch
        total = float(sum(int(array[-1]) for array in arrays))
        for segment in {ref.segment for ref in refs}:
            self._space.unlink(segment)
        return total


class Producer(Actor):
    """Writes rows on another host."""

    def __init__(self) -> None:
        self._rows = rows_of(self.ctx, LoopHosts(rows="near"))
        self._sink = self.ctx.ref("sink", Sink)

    @endpoint(timeout_s=300.0)
    def produce(self, rows: int, tokens: int, puts: int) -> tuple[float, float]:
        """Put so many rows; return seconds, and processor seconds of this process."""
        row = {
            "tokens": np.arange(tokens, dtype=np.int32),
            "logprobs": np.zeros(tokens, np.float32),
            "versions": np.ones(tokens, np.int32),
        }
        started, worked = time.perf_counter(), time.process_time()
        sending: list[Any] = []
        sinking: list[Any] = []
        for _ in range(puts):
            refs = [ref for each in self._rows.write([row] * rows) for ref in each.values()]
            sending.append(self._rows.hand_over(refs))
            if len(sending) >= WINDOW:
                sinking.append(self._tell(sending.pop(0)))
        sinking += [self._tell(each) for each in sending]
        for reply in sinking:
            reply.result()
        return time.perf_counter() - started, time.process_time() - worked

    def _tell(self, handed: Any) -> Any:
        while (berth := handed.missing()) is not None:
            berth.exception()
        if failure := handed.failure():
            raise RuntimeError(failure)
        return self._sink.ask(Sink.take, handed.records())


def raw_tcp(nbytes: int, messages: int) -> tuple[float, float]:
    """Return the seconds that the same bytes take from one process to another, and processor seconds."""
    buffer = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = [sys.executable, "-c", SENDER, str(server.getsockname()[1]), str(nbytes), str(messages)]
        with (
            subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as sender,
            server.accept()[0] as connection,
        ):
            started, worked, got = time.perf_counter(), time.process_time(), 0
            while got < nbytes * messages:
                at = got % nbytes
                got += connection.recv_into(buffer[at:])
            took, worked = time.perf_counter() - started, time.process_time() - worked
            sent_s = float(sender.communicate()[0])
        if sender.returncode:
            raise RuntimeError("the sender failed")
    return took, worked + sent_s


def cpu_s() -> float:
    """Return the processor seconds of all processes of the tree but this one, so far."""
    return sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True))


def measure(rounds: int, memory: Path) -> dict[str, Any]:
    """Return the figures of each kind of row."""
    hosts = [Host(name="near", address=ADDRESS, shm_root=str(memory / "near"))]
    hosts.append(Host(name="far", prefix=("env",), address=ADDRESS, shm_root=str(memory / "far")))
    for host in hosts:
        Path(host.shm_root).mkdir()
    children = (
        ChildSpec(id="dock", actor=RowDock, hosts=("near",)),
        ChildSpec(id="sink", actor=Sink, hosts=("near",)),
        ChildSpec(id="producer", actor=Producer, hosts=("far",)),
    )
    spec = SupervisorSpec(id="root", children=children)
    with Supervisor(spec, hosts=hosts, address=ADDRESS, shm_root=str(memory / "near")) as tree:
        return {kind: _rounds(tree, rounds, *shape) for kind, shape in KINDS.items()}


def _rounds(tree: Supervisor, rounds: int, rows: int, tokens: int, puts: int) -> dict[str, Any]:
    producer, dock = tree.ref("producer", Producer), tree.ref("dock", RowDock)
    nbytes = rows * tokens * 12
    producer.ask(Producer.produce, rows, tokens, WINDOW).result()  # warm memory
    before = dock.ask(RowDock.status).result().taken_bytes
    raw_mb_s, mb_s, rows_s, cpu_us, raw_cpu_s, all_cpu_s = [], [], [], [], [], []
    for _ in range(rounds):
        raw_took, raw_worked = raw_tcp(nbytes, puts)
        raw_mb_s.append(nbytes * puts / raw_took / 1e6)
        raw_cpu_s.append(raw_worked / (nbytes * puts) * 1e9)
        began = cpu_s()
        took, worked = producer.ask(Producer.produce, rows, tokens, puts).result()
        all_cpu_s.append((cpu_s() - began) / (nbytes * puts) * 1e9)
        mb_s.append(nbytes * puts / took / 1e6)
        rows_s.append(rows * puts / took)
        cpu_us.append(worked / (rows * puts) * 1e6)
    taken = dock.ask(RowDock.status).result().taken_bytes - before
    return {
        "bytes_a_row": tokens * 12,
        "rows_a_put": rows,
        "rows_per_s": spread(rows_s),
        "mb_per_s": spread(mb_s),
        "raw_tcp_mb_per_s": spread(raw_mb_s),
        "of_raw_tcp_frac": spread([ours / raw for ours, raw in zip(mb_s, raw_mb_s, strict=True)]),
        "producer_cpu_us_a_row": spread(cpu_us),
        "cpu_s_a_gb": spread(all_cpu_s),
        "raw_tcp_cpu_s_a_gb": spread(raw_cpu_s),
        "bytes_sent_a_byte": round(taken / (nbytes * puts * rounds), 4),
    }


def main() -> None:
    """Measure and write `results/remote-rows.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    memory = Path("/dev/shm") / f"remote-rows-{os.getpid()}-{secrets.token_hex(2)}"  # noqa: S108 - where rows lie
    memory.mkdir()
    try:
        write("remote-rows", measure(rounds, memory))
    finally:
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
