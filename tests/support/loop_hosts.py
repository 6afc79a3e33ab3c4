"""Several hosts for a run on one machine: agents of their own, and memory that only they know."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from loop_run import LoopRun, leftovers

from relax_actor.node.lease import LeaseTerms
from relax_actor.placement import Placement, Seat
from relax_actor.supervision.hosts import Host

ADDRESS = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME=eth0"
"""Of a namespace, for collectives; a session to another host finds it by the route to the head."""

_OWN_SHM = "mount -t tmpfs none /dev/shm && mkdir -p {}"
MARK = "RELAX_ACTOR_TEST_HOST"
"""Names, in the environment of a host's processes, the folder of its memory."""
TERMS = LeaseTerms(ttl_s=10.0, renew_s=1.0)


@dataclass(frozen=True, kw_only=True)
class LoopHosts:
    """Hosts named `a`, `b`, … whose memory is in folders of their own."""

    hosts: tuple[Host, ...]
    memory: Path

    @property
    def names(self) -> list[str]:
        """The hosts' names."""
        return [host.name for host in self.hosts]

    def rollouts_on(
        self,
        *names: str,
        gpus: tuple[str, ...] = (),
        spares: tuple[Seat, ...] = (),
        rewards: tuple[str, ...] = (),
    ) -> Placement:
        """Place everything on the first host, but the rollouts, and one reward actor, on these."""
        seats = [Seat(actor=f"rollout/{n}", host=name, gpus=gpus) for n, name in enumerate(names)]
        seats += [Seat(actor="reward", host=name) for name in rewards]
        return Placement(hosts=tuple(self.names), seats=tuple(seats), spares=spares)

    def settings(self, placement: Placement | None = None, **settings: Any) -> dict[str, Any]:
        """Return what `app.run` needs beside the rest."""
        return {
            "on_hosts": {
                "hosts": self.hosts,
                "placement": placement,
                "address": self.hosts[0].address,
                "lease": TERMS,
                **settings,
            },
            "queue": {"storage_path": str(self.memory / "a")},
        }

    def agents(self, name: str) -> list[psutil.Process]:
        """Return the node agents of a host: the children of keepers, as their command lines tell."""
        return [process for process in psutil.process_iter() if _is_agent(process, str(self.memory / name))]

    def lose(self, name: str) -> None:
        """Have no process be started any more on a host."""
        _gone(self.memory / name).mkdir()

    def assert_nothing_is_left(self, run: LoopRun) -> None:
        """Check that no process, socket and segment of the run is there, on any host (I8)."""
        assert leftovers(run.folder, run.run_id) == []
        assert [path.name for path in self.memory.rglob("*") if not path.is_dir()] == []


@contextmanager
def loop_hosts(count: int, network: Any = None, *, own_shm: bool = False) -> Iterator[LoopHosts]:
    """Make hosts; the first is the head's own, and with a network the others are its namespaces.

    Args:
        count: how many.
        network: see `namespaces`.
        own_shm: whether each of the others has a /dev/shm that nobody else sees, for those who look there.
    """
    memory = Path("/dev/shm") / f"relax-actor-hosts-{secrets.token_hex(4)}"  # noqa: S108 - what it is for
    hosts = []
    for name in "abcdefgh"[:count]:
        (memory / name).mkdir(parents=True)
        way = _way_to(memory / name) if hosts else ()
        address = ADDRESS if network is None else network.head
        if network is not None and hosts:
            space = chr(ord(name) - 1)  # the network's first is the loop's second
            way, address = (*network.inside(space), *way, "env", INTERFACE), network.address(space)
        if hosts and own_shm:
            own = f'{_OWN_SHM.format(memory / name)} && exec "$@"'
            way = ("unshare", "-m", "sh", "-c", own, "sh", *way)
        hosts.append(Host(name=name, prefix=way, address=address, shm_root=str(memory / name)))
    try:
        yield LoopHosts(hosts=tuple(hosts), memory=memory)
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _way_to(memory: Path) -> tuple[str, ...]:
    """Return a command that runs another one on a host, unless the host is lost."""
    return ("sh", "-c", f'test ! -d {_gone(memory)} && exec env {MARK}={memory} "$@"', "sh")


def _gone(memory: Path) -> Path:
    return memory.with_name(f"{memory.name}-is-gone")


def _is_agent(process: psutil.Process, mark: str) -> bool:
    """Whether a process is a keeper's child: it, its parent and its own children have one command line."""
    with suppress(psutil.Error):
        ancestors = process.parents()[:2]
        is_here = process.environ().get(MARK) == mark
        return is_here and [_is_node(each) for each in (process, *ancestors)] == [True, True, False]
    return False


def _is_node(process: psutil.Process) -> bool:
    return "relax_actor.node" in process.cmdline()
