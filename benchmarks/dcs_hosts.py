"""What does it take until several stores have a policy version? Chain and group, beside a raw stream.

A row of `dcs.py`. Every store is a process with a folder of shared memory of its own, all on this machine: a
version crosses loopback once for each of them, so on few cores the rate of one falls with their number.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from common import spread

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.roles.store import PolicyStore
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace

WAYS = ("chain", "group")
STORES = (2, 3)
BUCKET_BYTES = 16 << 20


class Hosts:
    """Some stores below the publisher's, and the way that versions take to them."""

    def __init__(self, stack: ExitStack, root: Path, way: str, stores: int, nbytes: int) -> None:
        names = tuple(f"store_{index}" for index in range(stores + 1))
        run_id = secrets.token_hex(4)
        spaces = [ShmSpace(run_id, root / f"{way}{stores}_{name}") for name in names]
        for space in spaces:
            space.root.mkdir()
        children = tuple(
            ChildSpec(
                id=name,
                actor=PolicyStore,
                args={"chain": names, "shm_root": str(space.root), "relay": way},
                zygote="torch" if way == "group" else "default",
            )
            for name, space in zip(names, spaces, strict=True)
        )
        zygotes = {"default": (), **({"torch": ("torch.distributed",)} if way == "group" else {})}
        spec = SupervisorSpec(id="bench", children=children)
        self._tree = stack.enter_context(Supervisor(spec, run_id=run_id, zygotes=zygotes))
        self._publisher = stack.enter_context(PolicyPublisher(spaces[0], bucket_bytes=BUCKET_BYTES))
        self._below = [PolicyReceiver(space) for space in spaces[1:]]
        self._names, self._way, self._version = names[1:], way, -1
        flat = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
        self._weights = [(f"{i}.weight", part) for i, part in enumerate(np.split(flat, nbytes >> 22))]

    def relay(self) -> float:
        """Publish a version; return the seconds until the last store has it, all of it by this way."""
        while True:
            self._await_group()
            self._version += 1
            self._publisher.publish(self._version, 0, self._weights)
            began = time.perf_counter()
            while any(receiver.latest() != self._version for receiver in self._below):
                time.sleep(0.0005)
            seconds = time.perf_counter() - began
            if self._ways() == {self._way}:
                return seconds

    def _await_group(self) -> None:
        if self._way == "group":
            refs = [self._tree.ref(name, PolicyStore) for name in self._names]
            while not all(ref.ask(PolicyStore.status).result().group_epoch for ref in refs):
                time.sleep(0.01)

    def _ways(self) -> set[str]:
        """Return by which ways the newest version came, once all stores have said so."""
        while True:
            events = read_events(self._tree.run_dir / "events.jsonl")[0]
            ways = [
                event["relay"]
                for event in events
                if event["kind"] == "policy_relayed" and event["version"] == self._version
            ]
            if len(ways) == len(self._names):
                return set(ways)


@contextmanager
def several(root: Path, nbytes: int) -> Iterator[dict[str, Hosts]]:
    """Yield what there is to compare, by name."""
    with ExitStack() as stack:
        yield {f"{way}_to_{n}": Hosts(stack, root, way, n, nbytes) for n in STORES for way in WAYS}


def figures(rounds: list[dict[str, float]], nbytes: int) -> dict[str, object]:
    """Sum up: what one store gets, in GB/s; and how much faster the group is, round by round."""
    rates = {name: spread([nbytes / one[name] / 1e9 for one in rounds]) for name in rounds[0]}
    gains = {
        f"group_over_chain_to_{n}": spread([one[f"chain_to_{n}"] / one[f"group_to_{n}"] for one in rounds])
        for n in STORES
    }
    return {"workload": f"{nbytes >> 20} MiB until the last store has it", "GB_per_s": rates, **gains}
