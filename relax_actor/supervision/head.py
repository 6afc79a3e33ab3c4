"""The head of a run, put together: who decides, who carries out, the hosts, and the thread all of it runs in.

A `supervisor.Supervisor` is how a program speaks with it. The head's thread is the courier's; whatever is to
happen there is handed over by `tell` or `decide`.
"""

import os
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from relax_actor.actor.courier import Courier
from relax_actor.actor.wire import NodeConfig
from relax_actor.errors import ConfigError
from relax_actor.ids import Holder
from relax_actor.node.lease import LeaseTerms
from relax_actor.supervision.changes import Changes
from relax_actor.supervision.epoch import next_epoch
from relax_actor.supervision.events import Event
from relax_actor.supervision.fleet import Fleet
from relax_actor.supervision.foothold import Foothold
from relax_actor.supervision.hook import Hook
from relax_actor.supervision.hosts import Host
from relax_actor.supervision.policy import TreePolicy
from relax_actor.supervision.spec import SupervisorSpec
from relax_actor.supervision.tree import TreeShell
from relax_actor.telemetry import EventLog
from transport.address import Address
from transport.security import CurveKeys


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a head is told; the fields are the arguments of `Supervisor`, checked."""

    spec: SupervisorSpec
    run_dir: Path
    run_id: str
    zygotes: Mapping[str, Sequence[str]]
    shm_root: str
    hosts: tuple[Host, ...]
    address: str
    lease: LeaseTerms
    join_timeout_s: float
    fan_out: int
    on_failure: Hook | None
    on_failure_s: float
    stop_total_s: float | None


class Head:
    """Watches one tree from its start to its end.

    Args:
        plan: what it is told.
        changes: whom it wakes when something has changed.

    Attributes:
        epoch: how many heads have run in this run folder, this one included.
        policy: who decides; may be asked from any thread.
        shell: who carries that out.
        courier: who brings messages.
    """

    def __init__(self, plan: Plan, changes: Changes) -> None:
        for folder in ("logs", "crash"):
            (plan.run_dir / folder).mkdir(parents=True, exist_ok=True)
        self._foothold = Foothold(plan.run_id, plan.shm_root)
        self._is_elsewhere = all(host.prefix for host in plan.hosts)
        address = Address.ipc(self._foothold.folder / "head")
        keys = CurveKeys.generate() if len(plan.hosts) > 1 or plan.address else None
        config = _node_config(plan, address, keys)
        self.epoch = config.epoch
        self.policy = _policy(plan)
        self.shell = _shell(plan, self.policy, config, changes)
        self.courier = Courier(
            Holder("head", config.epoch),
            config.run_mark,
            address,
            on_record=self.shell.heard,
            remote=Address.tcp(plan.address) if plan.address else None,
            keys=keys,
            space=self._foothold.space,
        )

    def start_thread(self) -> None:
        """Begin to listen."""
        self.courier.start()
        if self._is_elsewhere:
            self._foothold.keep_clear(self.epoch)

    def start_tree(self) -> None:
        """Start the hosts, and the tree once they have joined; returns at once."""
        self.courier.run_soon(self.shell.start, self.courier)

    def tell(self, event: Event) -> None:
        """Give the policy an event; returns at once."""
        self.courier.run_soon(self.shell.handle, event)

    def decide(self, event: Event) -> None:
        """Give the policy an event and wait for its decision.

        Raises:
            SpecError: it refuses; nothing is changed.
        """
        decided: Future[None] = Future()

        def handle() -> None:
            try:
                self.shell.handle(event)
                decided.set_result(None)
            except ConfigError as refusal:
                decided.set_exception(refusal)

        self.courier.run_soon(handle)
        decided.result()

    def close(self) -> None:
        """End the thread, once the tree has ended, and leave nothing on this host."""
        done = threading.Event()
        self.courier.run_soon(self._close_shell, done)
        done.wait()
        self.courier.stop()
        self._foothold.leave()

    def _close_shell(self, done: threading.Event) -> None:
        try:
            self.shell.close()
        finally:
            done.set()


def _node_config(plan: Plan, head: Address, keys: CurveKeys | None) -> NodeConfig:
    return NodeConfig(
        run_id=plan.run_id,
        run_dir=str(plan.run_dir),
        socket_dir=str(Path(head.path).parent),
        head=str(head),
        head_pid=os.getpid(),
        shm_root=plan.shm_root,
        zygotes={name: tuple(modules) for name, modules in plan.zygotes.items()},
        path=tuple(entry or str(Path.cwd()) for entry in sys.path),
        epoch=next_epoch(plan.run_dir),
        keys=keys.to_bytes() if keys else b"",
        lease=plan.lease,
        join_timeout_s=plan.join_timeout_s,
    )


def _policy(plan: Plan) -> TreePolicy:
    return TreePolicy(
        plan.spec,
        random.Random(),  # noqa: S311 - jitter
        consult_s=plan.on_failure_s if plan.on_failure else None,
        stop_total_s=plan.stop_total_s,
    )


def _shell(plan: Plan, policy: TreePolicy, config: NodeConfig, changes: Changes) -> TreeShell:
    events_log = EventLog(plan.run_dir / "events.jsonl", "head", config.epoch)
    fleet = Fleet(plan.hosts, config, events_log, plan.fan_out)
    return TreeShell(policy, fleet, config, events_log, changes.tell, plan.on_failure)
