"""Embedding: `with Supervisor(spec) as tree:` in any Python program.

The supervisor's thread watches the tree; the program's own threads call actors through refs. Leaving the
block stops the tree in reverse order, each child within its deadline, and leaves nothing behind.
"""

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from relax_actor.actor.base import Actor
from relax_actor.actor.ref import Ref
from relax_actor.errors import StartFailed
from relax_actor.node.lease import LeaseTerms
from relax_actor.supervision import events
from relax_actor.supervision.changes import Changes
from relax_actor.supervision.commands import Finished
from relax_actor.supervision.head import Head, Plan
from relax_actor.supervision.hook import Hook
from relax_actor.supervision.hosts import LOCAL, Host, check_hosts, check_placement
from relax_actor.supervision.monitor import Monitor
from relax_actor.supervision.spec import ChildSpec, SupervisorSpec, children_names
from relax_actor.supervision.spec_checks import validate
from relax_actor.supervision.starts import FAN_OUT
from relax_actor.supervision.status import NodeStatus

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
        hosts = tuple(hosts) or (LOCAL,)
        check_hosts(hosts, address)
        check_placement(spec, {host.name for host in hosts})
        run_id = run_id or secrets.token_hex(4)
        run_dir = run_dir or Path(tempfile.mkdtemp(prefix=f"relax-actor-{run_id}-"))
        self._plan = Plan(
            spec=spec,
            run_dir=run_dir.resolve(),
            run_id=run_id,
            zygotes=zygotes,
            shm_root=shm_root,
            hosts=hosts,
            address=address,
            lease=lease,
            join_timeout_s=join_timeout_s,
            fan_out=fan_out,
            on_failure=on_failure,
            on_failure_s=on_failure_s,
            stop_total_s=stop_total_s,
        )
        self._changes = Changes()
        self._head: Head
        self._open = False

    # -- lifetime -------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the tree and return at once; `wait_ready` waits for it."""
        self._head = Head(self._plan, self._changes)
        self._head.start_thread()
        self._open = True
        self._head.start_tree()
        return self

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return once every child is ready.

        Raises:
            StartFailed: the tree ended before that, or the time is over; says who was late.
        """
        shell, caller = self._head.shell, self._head.courier.caller
        ready = self._changes.wait_for(lambda: shell.is_ready or shell.finished is not None, timeout_s)
        if shell.is_ready:
            return
        if ready and shell.finished is not None:
            raise StartFailed(shell.finished.reason)
        late = [name for name in children_names(self._plan.spec) if caller.incarnation_of(name) is None]
        raise StartFailed(f"not ready after {timeout_s:g} s: {', '.join(late)}")

    def wait(self, timeout_s: float | None = None) -> Finished | None:
        """Return how the tree ended, or None if it still runs after `timeout_s`."""
        self._changes.wait_for(lambda: self._head.shell.finished is not None, timeout_s)
        return self._head.shell.finished

    def stop(self, reason: str = "stop requested") -> None:
        """Ask the tree to stop in order; returns at once."""
        self._head.tell(events.StopRequested(reason=reason))

    def kill(self, reason: str = "kill requested") -> None:
        """Kill every actor at once; returns at once."""
        self._head.tell(events.KillRequested(reason=reason))

    def close(self) -> None:
        """Stop what runs, wait for it, and leave nothing behind: no process, socket or segment.

        Ctrl-C meanwhile kills what has not stopped yet, and is raised when everything is gone.
        """
        if not self._open:
            return
        self._open = False
        interrupt = self._stopped()
        self._head.close()
        if interrupt is not None:
            raise interrupt

    def _stopped(self) -> KeyboardInterrupt | None:
        """Have the tree end; return how that was interrupted, which may happen at any of these lines."""
        interrupt = None
        while self._head.shell.finished is None:
            try:
                if interrupt is None:
                    self.stop("its block was left")
                else:
                    self.kill("interrupted while it stopped")
                self.wait()
            except KeyboardInterrupt as again:
                interrupt = again
        return interrupt

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
        return Ref(name, self._head.courier.caller)

    def add_child(self, supervisor: str, spec: ChildSpec | SupervisorSpec) -> None:
        """Append a child to a running supervisor and start it; does not wait until it is ready.

        Raises:
            SpecError: no such supervisor, or a spec that cannot be run; nothing is changed.
        """
        check_placement(spec, {host.name for host in self._plan.hosts})
        self._head.decide(events.AddChild(supervisor=supervisor, spec=spec))

    def remove_child(self, name: str) -> None:
        """Stop and forget an actor, all replicas of a child, or a supervisor; does not wait for its end.

        Raises:
            SpecError: there is nothing of that name.
        """
        self._head.decide(events.RemoveChild(name=name))

    def scale(self, child: str, replicas: int) -> None:
        """Have an elastic child have so many replicas; does not wait until they are there, or gone.

        New replicas start; those with the highest numbers leave: see `Actor.on_drain`.

        Raises:
            SpecError: it cannot have them, or an earlier change is not done yet; nothing is changed.
        """
        self._head.decide(events.Scale(child=child, replicas=replicas))

    def kill_child(self, name: str, reason: str = "asked to kill") -> None:
        """Kill one actor; what follows is what follows from any failure of it.

        Raises:
            SpecError: there is no such actor, or it has no process now.
        """
        self._head.decide(events.KillChild(name=name, reason=reason))

    def replicas(self, child: str) -> int:
        """Return how many replicas a child has, those that come and go included.

        Raises:
            SpecError: there is no such child.
        """
        return self._head.policy.replicas(child).count

    def link(self, a: str, b: str) -> None:
        """Have two actors share their fate from now on: where one fails, the other is killed.

        Raises:
            SpecError: one of them is no actor of the tree.
        """
        self._head.decide(events.LinkAdded(a=a, b=b))

    def monitor(self, name: str) -> Monitor:
        """Return what becomes of an actor from now on, incarnation by incarnation; see `Monitor`."""
        return self._head.shell.monitors.monitor(name)

    def status(self) -> NodeStatus:
        """Return the tree: every node's name, state, incarnation and restarts."""
        return self._head.policy.snapshot()

    @property
    def run_id(self) -> str:
        """What marks everything the run owns."""
        return self._plan.run_id

    @property
    def run_dir(self) -> Path:
        """Where logs, crash reports and the event log are."""
        return self._plan.run_dir

    @property
    def homeless(self) -> Mapping[str, str]:
        """The actors that wait for a host, with the host and why it is away."""
        return self._head.shell.homeless.why

    @property
    def host(self) -> str:
        """The name of this process's own host in the tree; empty where no actor runs on it."""
        return next((host.name for host in self._plan.hosts if not host.prefix), "")

    @property
    def shm_root(self) -> str:
        """The folder of this host's shared-memory segments."""
        roots = (host.shm_root for host in self._plan.hosts if not host.prefix)
        return next(roots, "") or self._plan.shm_root

    @property
    def incarnation(self) -> int:
        """How many supervisors have run in this run folder, this one included; known once it is started."""
        return self._head.epoch

    def pid(self, name: str) -> int | None:
        """Return the pid of the incarnation that runs, if any."""
        return self._head.shell.pid(name)
