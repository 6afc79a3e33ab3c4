"""A whole run: how it begins, goes on and ends.

Read this file for the shape of the system: `run` says how a run goes, in the order of its phases. Each part
is somewhere else:

- `cast`: who is in a run, a function a role, whose actor is in `roles/`
- `protocol`: what the actors say to one another
- `homes` and `devices`: on which host each actor is, and on which GPUs
- `zygote_imports`: what their processes have imported when they are forked
- `supervision/`: who starts, watches and restarts them
- `outcome`: how a run is watched and ended, by itself or from outside
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

from relax_actor import homes
from relax_actor.cast import tree
from relax_actor.config import Config, RolloutConfig
from relax_actor.node.lease import LeaseTerms
from relax_actor.outcome import Outcome, RunControl, watch
from relax_actor.placement import Placement
from relax_actor.roles import verdict
from relax_actor.supervision.hosts import Host
from relax_actor.supervision.spec import Backoff
from relax_actor.supervision.supervisor import Supervisor
from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.memory import remove_spilled
from relax_actor.zygote_imports import zygotes

__all__ = ["Outcome", "OverHosts", "RunControl", "run"]


class OverHosts(TypedDict, total=False):
    """What a run over several hosts says of them; the defaults are those of `Supervisor`."""

    hosts: Sequence[Host]  # where actors run, the trainer and the rows on the first; none is this machine
    address: str  # where the other hosts reach this program
    lease: LeaseTerms  # how long a host that does not answer is believed in
    join_timeout_s: float  # how long all hosts together may take to be there
    fan_out: int  # how many sessions to other hosts may be on their way at once


def run(
    config: Config,
    folder: Path,
    *,
    run_id: str,
    resume: Path | None = None,
    control: RunControl | None = None,
    on_tick: Callable[[], None] | None = None,
    env: Mapping[str, str] | None = None,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
    placement: Placement | None = None,
    **over_hosts: Unpack[OverHosts],
) -> Outcome:
    """Run to the end and leave nothing behind but the run folder.

    Args:
        config: checked already.
        folder: the run folder.
        run_id: eight hex digits; marks everything the run owns.
        resume: a checkpoint folder to start from.
        control: how the caller ends it early.
        on_tick: called about ten times a second, in this thread.
        env: added to the environment of every actor.
        backoff: how soon an actor that died is started again.
        placement: where each actor is; None deals the rollouts to the hosts in turn.
        **over_hosts: the hosts, where there are several.

    Raises:
        SpecError: hosts and placement do not fit one another, or what has to be together.
        UnplacedError: the placement says nothing of a rollout.
    """
    names = [host.name for host in over_hosts.get("hosts", ())]
    if placement is None and len(names) > 1:
        placement = homes.spread(config, names)
    start = str(resume or "")
    verdict.clear(folder)
    supervisor = Supervisor(
        tree(config, resume=start, placement=placement, env=env, backoff=backoff),
        run_dir=folder,
        run_id=run_id,
        zygotes=zygotes(config),
        shm_root=config.queue.storage_path,
        **over_hosts,
    )
    with closing(EventLog(folder / "events.jsonl", "head", 1)) as events:
        _tell_of_the_start(events, config, run_id, start)
        with _leaving_nothing(supervisor, folder):
            _link_parts(supervisor, config.rollout)
            outcome = watch(supervisor, config, control, on_tick)
        outcome = _known_better(outcome, folder)
        events.emit("run_ended", exit_code=outcome.exit_code, reason=outcome.reason)
    return outcome


def _tell_of_the_start(events: EventLog, config: Config, run_id: str, resumed_from: str) -> None:
    events.emit(
        "run_started",
        run_id=run_id,
        mode=config.run.mode,
        max_staleness=config.run.max_staleness,
        steps=config.run.steps,
        resumed_from=resumed_from,
    )


@contextmanager
def _leaving_nothing(supervisor: Supervisor, folder: Path) -> Iterator[None]:
    """Start the tree; at the end of the block nothing of it is left, in memory or on disk."""
    supervisor.start()
    try:
        yield
    finally:
        supervisor.close()
        remove_spilled(supervisor.run_id, folder)


def _link_parts(supervisor: Supervisor, rollouts: RolloutConfig) -> None:
    """Have a replica over several hosts live and die as one."""
    for replica in range(rollouts.replicas):
        rollout, *parts = homes.members_of(replica, rollouts.hosts_per_replica)
        for part in parts:
            supervisor.link(rollout, part)


def _known_better(outcome: Outcome, folder: Path) -> Outcome:
    """Return how a run ended; one that ended in order has failed where an actor left word of that."""
    failure = verdict.find(folder) if outcome.exit_code == 0 else ""
    return Outcome(exit_code=1, reason=failure) if failure else outcome
