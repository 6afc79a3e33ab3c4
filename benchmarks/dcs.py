"""What do policy versions cost on a CPU? Publish, install and relay, beside copies and raw streams.

    python benchmarks/dcs.py --mib 256 --rounds 7

An install while a replica decodes is a copy: a thread has verified before. Beside it is what a replica does
that has nothing to decode, both at once.

Within a round everything is measured once, one after another, on warm memory; ratios are taken round by
round. Publishing sums up as well as copies, so beside memcpy there is memcpy and then XXH3 over the same
bytes. The raw streams go from process to process over loopback TCP, out of one mapped segment and into
another: bare sockets, and ZeroMQ (PUSH and PULL, messages of 8 MiB, received as frames and copied). The relay
is two stores in processes of a tree, each with a folder of shared memory; its rate is from the offer until
the version is visible, checksums included. What one thread does is also compared by its CPU time, which a
busy machine disturbs less.
"""

import argparse
import multiprocessing
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
import zmq
from common import spread, write

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.roles.store import PolicyStore
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace

NAMES = ("store_a", "store_b")
BUCKET_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20
SENDERS = multiprocessing.get_context("forkserver")  # a fork would make this process' memory copy on write
WARM_UP = 3
"""Rounds that are not counted: memory is made and touched."""


class Took(NamedTuple):
    """How long something took; CPU of the one thread that did it, 0 where others did."""

    wall_s: float
    cpu_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    nbytes = args.mib << 20
    with bench(nbytes) as tests:
        rounds = [{name: test() for name, test in tests.items()} for _ in range(args.rounds + WARM_UP)][
            WARM_UP:
        ]
    write("dcs", {"workload": f"{args.mib} MiB of weights in buckets of 64 MiB", **figures(rounds, nbytes)})


def figures(rounds: list[dict[str, Took]], nbytes: int) -> dict[str, object]:
    """Sum up: every rate in GB/s of wall time, and the ratios that there are targets for."""

    def over(ours: str, floor: str, target: float | None = None, *, of: str = "wall_s") -> dict[str, object]:
        ratio = spread([getattr(one[floor], of) / getattr(one[ours], of) for one in rounds])
        return ratio | ({"target": target, "met": ratio["median"] >= target} if target else {})

    return {
        "GB_per_s": {name: spread([nbytes / one[name].wall_s / 1e9 for one in rounds]) for name in rounds[0]},
        "publish_over_memcpy": over("publish", "memcpy"),
        "publish_over_memcpy_cpu": over("publish", "memcpy", 0.8, of="cpu_s"),
        "publish_over_memcpy_then_xxh3": over("publish", "memcpy_then_xxh3"),
        "publish_over_memcpy_then_xxh3_cpu": over("publish", "memcpy_then_xxh3", 0.8, of="cpu_s"),
        "install_over_verify_then_install": over("install", "verify_then_install"),
        "install_over_memcpy": over("install", "memcpy"),
        "install_over_memcpy_cpu": over("install", "memcpy", 0.8, of="cpu_s"),
        "relay_over_raw_tcp": over("relay", "raw_tcp", 0.8),
        "relay_over_raw_zmq": over("relay", "raw_zmq", 0.8),
    }


@contextmanager
def bench(nbytes: int) -> Iterator[dict[str, Callable[[], Took]]]:
    """Yield what is measured: by name, a function that does it once and returns its seconds."""
    root = Path(tempfile.mkdtemp(prefix="relax-bench-dcs-", dir="/dev/shm"))
    run_id = secrets.token_hex(4)
    for name in (*NAMES, "raw"):
        (root / name).mkdir()
    children = tuple(
        ChildSpec(id=name, actor=PolicyStore, args={"chain": NAMES, "shm_root": str(root / name)})
        for name in NAMES
    )
    raw = ShmSpace(run_id, root / "raw")
    try:
        with (
            Supervisor(SupervisorSpec(id="bench", children=children), run_id=run_id) as tree,
            PolicyPublisher(ShmSpace(run_id, root / NAMES[0]), bucket_bytes=BUCKET_BYTES) as publisher,
            raw.create("raw", 0, "from", nbytes) as source,
            raw.create("raw", 0, "to", nbytes) as target,
        ):
            host = _Host(tree, publisher, root, nbytes)
            yield {
                "memcpy": lambda: timed(lambda: np.copyto(host.copies, host.flat)),
                "publish": host.publish,
                "relay": host.await_relay,
                "raw_tcp": lambda: raw_tcp(raw, source.name, target.buf),
                "memcpy_then_xxh3": host.copy_and_sum,
                "install": host.install,
                "verify_then_install": lambda: host.install(verifies=True),
                "raw_zmq": lambda: raw_zmq(raw, source.name, target.buf),
            }
    finally:
        shutil.rmtree(root)


class _Host:
    """The trainer's host, and the next one."""

    def __init__(self, tree: Supervisor, publisher: PolicyPublisher, root: Path, nbytes: int) -> None:
        self._tree, self._publisher, self._nbytes = tree, publisher, nbytes
        self._here, self._there = (PolicyReceiver(ShmSpace(tree.run_id, root / name)) for name in NAMES)
        self.flat = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
        self.copies = np.zeros(nbytes, np.uint8)
        self._weights = [
            (f"model.layers.{index}.weight", part)
            for index, part in enumerate(np.split(self.flat.view(np.float32), nbytes >> 23))
        ]
        self._installed = [np.zeros_like(part) for _, part in self._weights]
        self._version = -1

    def publish(self) -> Took:
        self._version += 1
        return timed(lambda: self._publisher.publish(self._version, 0, self._weights))

    def install(self, *, verifies: bool = False) -> Took:
        def copy_all() -> None:
            with self._here.open() as snapshot:
                if verifies:
                    snapshot.verify()
                for target, (_, array) in zip(self._installed, snapshot.arrays(), strict=True):
                    np.copyto(target, array)

        return timed(copy_all)

    def copy_and_sum(self) -> Took:
        def work() -> None:
            np.copyto(self.copies, self.flat)
            xxhash.xxh3_64_intdigest(self.copies)

        return timed(work)

    def await_relay(self) -> Took:
        """Return how long the version that was just published took, as the store says."""
        while self._there.latest() != self._version:
            time.sleep(0.001)
        while True:
            events = read_events(self._tree.run_dir / "events.jsonl")[0]
            for event in events:
                if event["kind"] == "policy_relayed" and event["version"] == self._version:
                    return Took(event["seconds"])


def timed(work: Callable[[], object]) -> Took:
    started, cpu_s = time.perf_counter(), time.thread_time()
    work()
    return Took(time.perf_counter() - started, time.thread_time() - cpu_s)


def raw_tcp(space: ShmSpace, source: str, target: memoryview) -> Took:
    """Stream one mapping into another, over loopback, from a process to this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = SENDERS.Process(target=_send_tcp, args=(server.getsockname()[1], space, source))
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.recv(1)
            started, done = time.perf_counter(), 0
            while done < len(target):
                done += connection.recv_into(target[done : done + CHUNK_BYTES], 0, socket.MSG_WAITALL)
            seconds = time.perf_counter() - started
        sender.join()
    return Took(seconds)


def _send_tcp(port: int, space: ShmSpace, name: str) -> None:
    source = _warmed(space, name)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"!")
        connection.sendall(source)


def raw_zmq(space: ShmSpace, source: str, target: memoryview) -> Took:
    """Do the same by ZeroMQ, which receives into memory of its own."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        sender = SENDERS.Process(target=_send_zmq, args=(port, space, source))
        sender.start()
        pull.recv()
        started, done = time.perf_counter(), 0
        while done < len(target):
            frame = pull.recv(copy=False)
            target[done : done + len(frame)] = frame.buffer
            done += len(frame)
        seconds = time.perf_counter() - started
        sender.join()
    return Took(seconds)


def _warmed(space: ShmSpace, name: str) -> memoryview:
    """Map a segment and touch every page of it."""
    data = space.attach(name).buf
    xxhash.xxh3_64_intdigest(data)
    return data


def _send_zmq(port: int, space: ShmSpace, name: str) -> None:
    source = _warmed(space, name)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{port}")
        push.send(b"!")
        for begin in range(0, len(source), CHUNK_BYTES):
            push.send(source[begin : begin + CHUNK_BYTES], copy=False)


if __name__ == "__main__":
    main()
