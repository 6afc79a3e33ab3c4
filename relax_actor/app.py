"""A whole run: which actors there are, what they owe one another, and how it ends.

Read this file for the shape of the system: `tree` says who is in a run, in the order data flows, with a
function below for each role, whose actor is in `roles/`; `run` says how a run goes. What the actors say to
one another is in `protocol`. Each part is somewhere else:

- `homes` and `devices`: on which host each actor is, and on which GPUs
- `zygote_imports`: what their processes have imported when they are forked
- `supervision/`: who starts, watches and restarts them
- `outcome`: how a run is watched and ended, by itself or from outside
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from relax_actor import homes
from relax_actor.config import Config, RolloutConfig
from relax_actor.data.template import PromptEncoder
from relax_actor.devices import host_gpus, rollout_gpus, trainer_gpus
from relax_actor.homes import LoopHosts
from relax_actor.node.lease import LeaseTerms
from relax_actor.outcome import Outcome, RunControl, watch
from relax_actor.placement import Placement
from relax_actor.roles import verdict
from relax_actor.supervision.hosts import Host
from relax_actor.supervision.spec import Backoff, ChildSpec, Elastic, Intensity, RestartType, SupervisorSpec
from relax_actor.supervision.supervisor import Supervisor
from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.memory import remove_spilled
from relax_actor.zygote_imports import zygotes

__all__ = ["Outcome", "OverHosts", "RunControl", "run", "stores", "tree"]

SERVER_START_S = 960.0
"""How long a rollout with a server may take to be ready; the server itself gives up a little sooner."""

PARTS_START_S = 300.0
"""How much longer it may take where parts of it are on other hosts, and have to be there first."""


class OverHosts(TypedDict, total=False):
    """What a run over several hosts says of them; the defaults are those of `Supervisor`."""

    hosts: Sequence[
        Host
    ]  # where actors run, the first that of the trainer and the rows; none is this machine
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


class _Cast(msgspec.Struct, frozen=True, kw_only=True):
    """What the specs of all roles are made of."""

    config: Config  # with the devices as the actors see them
    placement: Placement | None
    hosts: LoopHosts
    gpus: int  # of this host
    env: dict[str, str]
    backoff: Backoff

    @property
    def rollout_gpus(self) -> tuple[str, ...]:
        return rollout_gpus(self.config.rollout, self.gpus)


def tree(
    config: Config,
    *,
    resume: str = "",
    placement: Placement | None = None,
    env: Mapping[str, str] | None = None,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
) -> SupervisorSpec:
    """Return the run's supervision tree.

    Args:
        config: the run's.
        resume: a checkpoint folder for the first trainer, or empty.
        placement: where each actor is; None is this host, with its GPUs.
        env: added to the environment of every actor.
        backoff: how soon an actor that died is started again.

    Raises:
        UnplacedError: the placement says nothing of a rollout.
        SpecError: it puts elsewhere what has to be on the first host, or a replica on too few hosts.
    """
    cast = _cast(config, placement, env, backoff)
    spec = SupervisorSpec(
        id="run",
        backoff=backoff,
        intensity=Intensity(restarts=10, within_s=600.0),
        auto_shutdown="any",
        children=(
            _queue(cast),
            *_dock(cast),
            _prompts(cast),
            _reward(cast),
            *_stores(cast),
            _rollouts(cast),
            _trainer(cast, resume),
        ),
    )
    return spec if placement is None else homes.settled_tree(spec, placement)


def _cast(
    config: Config, placement: Placement | None, env: Mapping[str, str] | None, backoff: Backoff
) -> _Cast:
    hosts = LoopHosts()
    homes.check_replicas(config, placement)
    if placement is not None:
        homes.check(placement)
        config, hosts = homes.on_devices(config, placement), homes.loop_hosts(placement)
    return _Cast(
        config=config,
        placement=placement,
        hosts=hosts,
        gpus=host_gpus(),
        env=dict(env or {}),
        backoff=backoff,
    )


def _queue(cast: _Cast) -> ChildSpec:
    """Return who has the samples and knows what became of each: roles/queue.py."""
    return msgspec.structs.replace(_child(cast, "queue", "TransferQueue"), zygote="default")


def _dock(cast: _Cast) -> list[ChildSpec]:
    """Return who brings rows from host to host, where there are actors that need it: roles/dock.py."""
    if cast.placement is None or not homes.crosses_hosts(cast.placement):
        return []
    return [ChildSpec(id="dock", actor="relax_actor.roles.dock:RowDock", env=cast.env)]


def _prompts(cast: _Cast) -> ChildSpec:
    """Return who puts the prompts that the queue wants: roles/prompts.py."""
    return _child(cast, "prompts", "Prompts")


def _reward(cast: _Cast) -> ChildSpec:
    """Return who has samples scored: roles/reward.py."""
    return _child(cast, "reward", "Reward", hosts=cast.hosts, replicas=cast.config.reward.replicas)


def _stores(cast: _Cast) -> list[ChildSpec]:
    """Return who has the policy versions on each host: roles/store.py."""
    return stores(cast.config, tuple(cast.hosts.stores), stages=bool(cast.rollout_gpus), env=cast.env)


def stores(
    config: Config,
    hosts: Sequence[str],
    *,
    stages: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[ChildSpec]:
    """Return a store for each of several hosts, the trainer's first; one host needs none without GPUs.

    Each stays where it is: what it holds is in that host's memory.

    Args:
        config: the run's.
        hosts: their names; empty is this one.
        stages: whether they bring versions to GPUs.
        env: added to their environment.
    """
    names = tuple(f"store-{index}" for index in range(max(len(hosts), 1)))
    settings = {
        "keep": config.dcs.keep,
        "budget_bytes": config.dcs.budget_bytes,
        "patience_s": config.dcs.patience_s,
        "relay": config.dcs.relay,
    }
    return [
        ChildSpec(
            id=name,
            actor="relax_actor.roles.store:PolicyStore",
            args={"chain": names, "stages": stages, **settings},
            hosts=tuple(hosts[index : index + 1]),
            env=dict(env or {}),
            zygote="torch" if stages or config.dcs.relay == "group" else "default",
        )
        for index, name in enumerate(names)
        if len(names) > 1 or stages
    ]


def _rollouts(cast: _Cast) -> SupervisorSpec:
    """Return who samples, under a supervisor of their own: roles/rollout.py."""
    rollout = cast.config.rollout
    stops = PromptEncoder(Path(cast.config.model.path), cast.config.data).stop_token_ids(rollout)
    replicas = _child(
        cast, "rollout", "Rollout", stop_token_ids=stops, hosts=cast.hosts, replicas=rollout.replicas
    )
    return SupervisorSpec(
        id="rollouts",
        backoff=cast.backoff,
        # A replica that cannot stay up for a minute on average is not bad luck; two of ten may be.
        intensity=Intensity(restarts=10 * rollout.replicas * rollout.hosts_per_replica, within_s=600.0),
        # Once that is exceeded the run has failed: starting all of them over would go on for ever.
        restart=RestartType.TEMPORARY,
        significant=True,
        children=(
            *_parts(cast),  # before the rollouts, which ask them to start
            msgspec.structs.replace(
                replicas,
                always_indexed=True,
                devices=cast.rollout_gpus,
                spares=rollout.spares,
                claims_devices=rollout.spares > 0,
                elastic=_elastic(cast.config),
                start_timeout_s=_rollout_start_s(cast.config),
            ),
        ),
    )


def _parts(cast: _Cast) -> list[ChildSpec]:
    """Return what replicas have on their further hosts, if they are spread over several: roles/part.py."""
    rollout = cast.config.rollout
    count = rollout.replicas * (rollout.hosts_per_replica - 1)
    parts = [_child(cast, homes.PART, "Part", replicas=count)] if count else []
    return [msgspec.structs.replace(part, always_indexed=True) for part in parts]


def _elastic(config: Config) -> Elastic | None:
    rollout = config.rollout
    if rollout.hosts_per_replica > 1:  # the number of parts would have to change with that of rollouts
        return None
    return Elastic(least=rollout.min_replicas, most=rollout.max_replicas or None, drain_s=config.run.grace_s)


def _rollout_start_s(config: Config) -> float:
    """Return how long a rollout may take to start, its wait for a turn on the GPU included."""
    starts_s = SERVER_START_S if config.rollout.engine == "sglang" else 120.0
    starts_s += PARTS_START_S if config.rollout.hosts_per_replica > 1 else 0.0
    return starts_s + (config.train.lease_s if config.run.colocate else 0.0)


def _trainer(cast: _Cast, resume: str) -> ChildSpec:
    """Return who learns from the samples and publishes policy versions: roles/trainer.py."""
    return msgspec.structs.replace(
        _child(cast, "trainer", "Trainer", resume=resume),
        restart=RestartType.TRANSIENT,
        significant=True,  # the run ends when training does
        shutdown_s=cast.config.run.grace_s,
        devices=trainer_gpus(cast.config.train.device, cast.gpus),
    )


def _child(cast: _Cast, role: str, actor: str, *, replicas: int = 1, **args: object) -> ChildSpec:
    """Return the spec of a role's actors; every role's constructor takes the configuration."""
    return ChildSpec(
        id=role,
        actor=f"relax_actor.roles.{role}:{actor}",
        args={"config": cast.config, **args},
        replicas=replicas,
        zygote="torch",
        env=cast.env,
    )
