"""Embedding: `with Supervisor(spec) as tree:` in any Python program.

The supervisor's thread watches the tree; the program's own threads call actors through refs. Leaving the
block stops the tree in reverse order, each child within its deadline, and leaves nothing behind.
"""

import asyncio
import logging
import os
import random
import secrets
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from relax_actor.actor.base import Actor
from relax_actor.actor.courier import Courier
from relax_actor.actor.ref import Ref
from relax_actor.actor.wire import NodeConfig
from relax_actor.errors import ConfigError, StartFailed
from relax_actor.ids import Holder
from relax_actor.node.lease import LeaseTerms
from relax_actor.supervision import events
from relax_actor.supervision.changes import Changes
from relax_actor.supervision.commands import Finished
from relax_actor.supervision.epoch import next_epoch
from relax_actor.supervision.fleet import Fleet
from relax_actor.supervision.foothold import Foothold
from relax_actor.supervision.hook import Hook
from relax_actor.supervision.hosts import LOCAL, Host, check_hosts, check_placement
from relax_actor.supervision.monitor import Monitor
from relax_actor.supervision.policy import TreePolicy
from relax_actor.supervision.spec import ChildSpec, SupervisorSpec, children_names, validate
from relax_actor.supervision.starts import FAN_OUT
from relax_actor.supervision.status import NodeStatus
from relax_actor.supervision.tree import TreeShell
from relax_actor.telemetry import EventLog
from transport.address import Address
from transport.security import CurveKeys

A = TypeVar("A", bound=Actor)
log = logging.getLogger(__name__)

DEFAULT_ZYGOTES: Mapping[str, Sequence[str]] = {"default": ()}


class Supervisor:
    """A supervision tree of OS processes, started and stopped with a `with` block.

    Args:
        spec: the root supervisor.
        run_dir: where logs, crash reports and the event log go; a new temporary folder by default.
        run_id: marks everything the run owns; eight random hex digits by default.
        zygotes: for each name that a child spec's `zygote` uses, the modules it imports before it forks.
        shm_root: where shared-memory segments live.
        hosts: where actors run; none is this machine alone. See `ChildSpec.hosts`.
        address: where the other hosts reach this program: an IP address or a name of this machine.
        lease: how long a host that does not answer is believed in.
        join_timeout_s: how long all hosts together may take to be there.
        fan_out: how many sessions to other hosts may be on their way at once.
        on_failure: decides what follows from an actor's failure; called once for each incarnation that
            failed, on a thread of its own. None from it leaves the decision to the policy's rules.
        on_failure_s: how long it may take before the rules decide without it.
        stop_total_s: how long the tree may take to stop before what is left is killed; None: as long as the
            children's own `shutdown_s` allow.

    Raises:
        SpecError: the spec cannot be run; nothing was started.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        *,
        run_dir: Path | None = None,
        run_id: str = "",
        zygotes: Mapping[str, Sequence[str]] = DEFAULT_ZYGOTES,
        shm_root: str = "/dev/shm",  # noqa: S108 - that is where shared memory is
        hosts: Sequence[Host] = (),
        address: str = "",
        lease: LeaseTerms = LeaseTerms(),  # noqa: B008 - immutable
        join_timeout_s: float = 120.0,
        fan_out: int = FAN_OUT,
        on_failure: Hook | None = None,
        on_failure_s: float = 10.0,
        stop_total_s: float | None = None,
    ) -> None:
        validate(spec)
        self._hosts = tuple(hosts) or (LOCAL,)
        check_hosts(self._hosts, address)
        check_placement(spec, {host.name for host in self._hosts})
        self._address, self._lease, self._join_timeout_s = address, lease, join_timeout_s
        self.run_id = run_id or secrets.token_hex(4)
        self.run_dir = (run_dir or Path(tempfile.mkdtemp(prefix=f"relax-actor-{self.run_id}-"))).resolve()
        self._spec, self._zygotes, self._shm_root = spec, zygotes, shm_root
        self._hook, self._hook_s, self._stop_total_s = on_failure, on_failure_s, stop_total_s
        self._fan_out, self._changes = fan_out, Changes()
        self._courier: Courier
        self._shell: TreeShell
        self._open = False

    # -- lifetime -------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the tree and return at once; `wait_ready` waits for it."""
        for folder in ("logs", "crash"):
            (self.run_dir / folder).mkdir(parents=True, exist_ok=True)
        self._foothold = Foothold(self.run_id, self._shm_root)
        head = Address.ipc(self._foothold.folder / "head")
        keys = CurveKeys.generate() if len(self._hosts) > 1 or self._address else None
        config = self._node_config(head, keys)
        self._policy = TreePolicy(
            self._spec,
            random.Random(),  # noqa: S311 - jitter
            consult_s=self._hook_s if self._hook else None,
            stop_total_s=self._stop_total_s,
        )
        events_log = EventLog(self.run_dir / "events.jsonl", "head", config.epoch)
        fleet = Fleet(self._hosts, config, events_log, self._fan_out)
        self._shell = TreeShell(self._policy, fleet, config, events_log, self._changes.tell, self._hook)
        self._courier = Courier(
            Holder("head", config.epoch),
            config.run_mark,
            head,
            on_record=self._shell.heard,
            remote=Address.tcp(self._address) if self._address else None,
            keys=keys,
            space=self._foothold.space,
        )
        self._courier.start()
        if all(host.prefix for host in self._hosts):
            self._foothold.keep_clear(config.epoch)
        self._open = True
        self._courier.run_soon(self._shell.start, self._courier)
        return self

    def _node_config(self, head: Address, keys: CurveKeys | None) -> NodeConfig:
        self._epoch = next_epoch(self.run_dir)
        return NodeConfig(
            run_id=self.run_id,
            run_dir=str(self.run_dir),
            socket_dir=str(Path(head.path).parent),
            head=str(head),
            head_pid=os.getpid(),
            shm_root=self._shm_root,
            zygotes={name: tuple(modules) for name, modules in self._zygotes.items()},
            path=tuple(entry or str(Path.cwd()) for entry in sys.path),
            epoch=self._epoch,
            keys=keys.to_bytes() if keys else b"",
            lease=self._lease,
            join_timeout_s=self._join_timeout_s,
        )

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return once every child is ready.

        Raises:
            StartFailed: the tree ended before that, or the time is over; says who was late.
        """
        ready = self._changes.wait_for(
            lambda: self._shell.is_ready or self._shell.finished is not None, timeout_s
        )
        if self._shell.is_ready:
            return
        if ready and self._shell.finished is not None:
            raise StartFailed(self._shell.finished.reason)
        late = [
            name for name in children_names(self._spec) if self._courier.caller.incarnation_of(name) is None
        ]
        raise StartFailed(f"not ready after {timeout_s:g} s: {', '.join(late)}")

    def wait(self, timeout_s: float | None = None) -> Finished | None:
        """Return how the tree ended, or None if it still runs after `timeout_s`."""
        self._changes.wait_for(lambda: self._shell.finished is not None, timeout_s)
        return self._shell.finished

    def stop(self, reason: str = "stop requested") -> None:
        """Ask the tree to stop in order; returns at once."""
        self._courier.run_soon(self._shell.handle, events.StopRequested(reason=reason))

    def kill(self, reason: str = "kill requested") -> None:
        """Kill every actor at once; returns at once."""
        self._courier.run_soon(self._shell.handle, events.KillRequested(reason=reason))

    def close(self) -> None:
        """Stop what runs, wait for it, and leave nothing behind: no process, socket or segment.

        Ctrl-C meanwhile kills what has not stopped yet, and is raised when everything is gone.
        """
        if not self._open:
            return
        self._open = False
        interrupt: KeyboardInterrupt | None = None
        if self._shell.finished is None:
            self.stop("its block was left")
            interrupt = self._wait_for_the_end()
        self._tear_down()
        if interrupt is not None:
            raise interrupt

    def _wait_for_the_end(self) -> KeyboardInterrupt | None:
        interrupt = None
        while self._shell.finished is None:
            try:
                self.wait()
            except KeyboardInterrupt as again:
                interrupt = again
                self.kill("interrupted while it stopped")
        return interrupt

    def _tear_down(self) -> None:
        done = threading.Event()
        self._courier.run_soon(self._close_shell, done)
        done.wait()
        self._courier.stop()
        self._foothold.leave()

    def _close_shell(self, done: threading.Event) -> None:
        try:
            self._shell.close()
        finally:
            done.set()

    def __enter__(self) -> Self:
        """Start the tree and wait until it is ready."""
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the tree; an error of the block is raised after everything is gone."""
        self.close()

    async def __aenter__(self) -> Self:
        """Start the tree without blocking the event loop."""
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the tree without blocking the event loop."""
        await asyncio.to_thread(self.close)

    # -- while it runs --------------------------------------------------------------------------

    def ref(self, name: str, actor: type[A]) -> Ref[A]:
        """Return a ref to an actor of the tree; it is logical and follows restarts."""
        del actor  # only tells the type checker whose endpoints these are
        return Ref(name, self._courier.caller)

    def add_child(self, supervisor: str, spec: ChildSpec | SupervisorSpec) -> None:
        """Append a child to a running supervisor and start it; does not wait until it is ready.

        Raises:
            SpecError: no such supervisor, or a spec that cannot be run; nothing is changed.
        """
        check_placement(spec, {host.name for host in self._hosts})
        self._decide(events.AddChild(supervisor=supervisor, spec=spec))

    def remove_child(self, name: str) -> None:
        """Stop and forget an actor, all replicas of a child, or a supervisor; does not wait for its end.

        Raises:
            SpecError: there is nothing of that name.
        """
        self._decide(events.RemoveChild(name=name))

    def scale(self, child: str, replicas: int) -> None:
        """Have an elastic child have so many replicas; does not wait until they are there, or gone.

        New replicas start; those with the highest numbers leave: see `Actor.on_drain`.

        Raises:
            SpecError: it cannot have them, or an earlier change is not done yet; nothing is changed.
        """
        self._decide(events.Scale(child=child, replicas=replicas))

    def kill_child(self, name: str, reason: str = "asked to kill") -> None:
        """Kill one actor; what follows is what follows from any failure of it.

        Raises:
            SpecError: there is no such actor, or it has no process now.
        """
        self._decide(events.KillChild(name=name, reason=reason))

    def replicas(self, child: str) -> int:
        """Return how many replicas a child has, those that come and go included.

        Raises:
            SpecError: there is no such child.
        """
        return self._policy.replicas(child).count

    def _decide(self, event: events.Event) -> None:
        """Give the policy an event and wait for its decision, which may be a refusal."""
        decided: Future[None] = Future()

        def handle() -> None:
            try:
                self._shell.handle(event)
                decided.set_result(None)
            except ConfigError as refusal:
                decided.set_exception(refusal)

        self._courier.run_soon(handle)
        decided.result()

    def link(self, a: str, b: str) -> None:
        """Have two actors share their fate from now on: where one fails, the other is killed.

        Raises:
            SpecError: one of them is no actor of the tree.
        """
        self._decide(events.LinkAdded(a=a, b=b))

    def monitor(self, name: str) -> Monitor:
        """Return what becomes of an actor from now on, incarnation by incarnation; see `Monitor`."""
        return self._shell.monitors.monitor(name)

    def status(self) -> NodeStatus:
        """Return the tree: every node's name, state, incarnation and restarts."""
        return self._policy.snapshot()

    @property
    def homeless(self) -> Mapping[str, str]:
        """The actors that wait for a host, with the host and why it is away."""
        return self._shell.homeless.why

    @property
    def host(self) -> str:
        """The name of this process's own host in the tree; empty where no actor runs on it."""
        return next((host.name for host in self._hosts if not host.prefix), "")

    @property
    def shm_root(self) -> str:
        """The folder of this host's shared-memory segments."""
        roots = (host.shm_root for host in self._hosts if not host.prefix)
        return next(roots, "") or self._shm_root

    @property
    def incarnation(self) -> int:
        """How many supervisors have run in this run folder, this one included; known once it is started."""
        return self._epoch

    def pid(self, name: str) -> int | None:
        """Return the pid of the incarnation that runs, if any."""
        return self._shell.pid(name)
