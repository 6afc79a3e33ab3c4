"""A whole run: which actors there are, what they owe one another, and how it ends.

Read this file for the shape of the system, `protocol` for what the actors say, `roles/` for what they do.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec

from relax_actor import homes
from relax_actor.config import Config
from relax_actor.data.template import PromptEncoder
from relax_actor.devices import CPU, host_gpus, replica_groups, rollout_device, trainer_device
from relax_actor.homes import LoopHosts
from relax_actor.node.lease import LeaseTerms
from relax_actor.outcome import Outcome, RunControl, watch
from relax_actor.placement import Placement
from relax_actor.roles import verdict
from relax_actor.supervision.hosts import Host
from relax_actor.supervision.spec import Backoff, ChildSpec, Elastic, Intensity, RestartType, SupervisorSpec
from relax_actor.supervision.starts import FAN_OUT
from relax_actor.supervision.supervisor import Supervisor
from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.memory import remove_spilled

__all__ = ["TORCH_MODULES", "Outcome", "RunControl", "run", "stores", "tree", "zygotes"]

TORCH_MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "relax_actor.engines.transformers_engine",
    "relax_actor.trainers.torch_backend",
    "relax_actor.roles.prompts",
    "relax_actor.roles.reward",
    "relax_actor.roles.rollout",
    "relax_actor.roles.trainer",
)
"""What the zygote of the roles that use torch imports before it forks; nothing here touches a device."""

SERVER_START_S = 960.0
"""How long a rollout with a server may take to be ready; the server itself gives up a little sooner."""


PARTS_START_S = 300.0
"""How much longer it may take where parts of it are on other hosts, and have to be there first."""


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
    gpus, hosts = host_gpus(), LoopHosts()
    homes.check_replicas(config, placement)
    if placement is not None:
        homes.check(placement)
        config, hosts = homes.on_devices(config, placement), homes.loop_hosts(placement)
    stops = PromptEncoder(Path(config.model.path), config.data).stop_token_ids(config.rollout)
    child = partial(_child, config, dict(env or {}))
    rollouts = SupervisorSpec(
        id="rollouts",
        backoff=backoff,
        # A replica that cannot stay up for a minute on average is not bad luck; two of ten may be.
        intensity=Intensity(
            restarts=10 * config.rollout.replicas * config.rollout.hosts_per_replica, within_s=600.0
        ),
        # Once that is exceeded the run has failed: starting all of them over would go on for ever.
        restart=RestartType.TEMPORARY,
        significant=True,
        children=(
            *_parts(config, child),
            msgspec.structs.replace(
                child(
                    "rollout",
                    "Rollout",
                    stop_token_ids=stops,
                    hosts=hosts,
                    replicas=config.rollout.replicas,
                    indexed=True,
                ),
                devices=_rollout_gpus(config, gpus),
                spares=config.rollout.spares,
                claims_devices=config.rollout.spares > 0,
                elastic=_elastic(config),
                start_timeout_s=_rollout_start_s(config),
            ),
        ),
    )
    trainer = msgspec.structs.replace(
        child("trainer", "Trainer", resume=resume),
        restart=RestartType.TRANSIENT,
        significant=True,  # the run ends when training does
        shutdown_s=config.run.grace_s,
        devices=_on_gpu(trainer_device(config.train.device, gpus)),
    )
    spec = SupervisorSpec(
        id="run",
        backoff=backoff,
        intensity=Intensity(restarts=10, within_s=600.0),
        auto_shutdown="any",
        children=(
            msgspec.structs.replace(child("queue", "TransferQueue"), zygote="default"),
            *_dock(placement, env),
            child("prompts", "Prompts"),
            child("reward", "Reward", hosts=hosts, replicas=config.reward.replicas),
            *stores(config, tuple(hosts.stores), stages=bool(_rollout_gpus(config, gpus)), env=env),
            rollouts,
            trainer,
        ),
    )
    return spec if placement is None else _settled(spec, placement)


def _rollout_start_s(config: Config) -> float:
    """Return how long a rollout may take to start, its wait for a turn on the GPU included."""
    starts_s = SERVER_START_S if config.rollout.engine == "sglang" else 120.0
    parts_s = PARTS_START_S if config.rollout.hosts_per_replica > 1 else 0.0
    return starts_s + parts_s + (config.train.lease_s if config.run.colocate else 0.0)


def _parts(config: Config, child: Callable[..., ChildSpec]) -> list[ChildSpec]:
    """Return what replicas have on their further hosts; it starts before the rollouts, who ask it."""
    rollout = config.rollout
    count = rollout.replicas * (rollout.hosts_per_replica - 1)
    return [child(homes.PART, "Part", replicas=count, indexed=True)] if count else []


def _elastic(config: Config) -> Elastic | None:
    rollout = config.rollout
    if rollout.hosts_per_replica > 1:  # the number of parts would have to change with that of rollouts
        return None
    return Elastic(least=rollout.min_replicas, most=rollout.max_replicas or None, drain_s=config.run.grace_s)


def _settled(spec: SupervisorSpec, placement: Placement) -> SupervisorSpec:
    """Return the tree with everybody's places; stores have theirs already."""
    children = [
        _settled(child, placement)
        if isinstance(child, SupervisorSpec)
        else child
        if child.hosts
        else homes.settled(child, placement)
        for child in spec.children
    ]
    return msgspec.structs.replace(spec, children=tuple(children))


def _dock(placement: Placement | None, env: Mapping[str, str] | None) -> list[ChildSpec]:
    """Return who brings rows from host to host, where there are actors that need it."""
    if placement is None or not homes.crosses_hosts(placement):
        return []
    return [ChildSpec(id="dock", actor="relax_actor.roles.dock:RowDock", env=dict(env or {}))]


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


def _rollout_gpus(config: Config, gpus: int) -> tuple[str, ...]:
    """Return the GPUs that any replica may have."""
    if config.rollout.engine == "scripted":
        return ()
    if config.rollout.engine == "sglang":
        return _server_gpus(config, gpus)
    devices = (
        rollout_device(config.rollout.device, replica, gpus) for replica in range(config.rollout.replicas)
    )
    return tuple(dict.fromkeys(gpu for device in devices for gpu in _on_gpu(device)))


def _server_gpus(config: Config, gpus: int) -> tuple[str, ...]:
    """Return the GPUs that replicas and their spares may have."""
    rollout = config.rollout
    groups = replica_groups(rollout.device, gpus, rollout.gpus_each)
    used = groups[: rollout.replicas] if not rollout.spares else groups
    return tuple(gpu for group in used for device in group for gpu in _on_gpu(device))


def _on_gpu(device: str) -> tuple[str, ...]:
    return () if device == CPU else (device,)


def _child(
    config: Config,
    env: dict[str, str],
    role: str,
    actor: str,
    *,
    replicas: int = 1,
    indexed: bool = False,
    **args: object,
) -> ChildSpec:
    """Return the spec of a role's actors; every role's constructor takes the configuration."""
    return ChildSpec(
        id=role,
        actor=f"relax_actor.roles.{role}:{actor}",
        args={"config": config, **args},
        replicas=replicas,
        always_indexed=indexed,
        zygote="torch",
        env=env,
    )


def zygotes(config: Config) -> dict[str, tuple[str, ...]]:
    """Return what each zygote imports: the torch one also the model's own code, where transformers has it."""
    model_type = json.loads((Path(config.model.path) / "config.json").read_text()).get("model_type", "")
    code = f"transformers.models.{model_type}.modeling_{model_type}"
    server = ("relax_actor.roles.sglang_engine",) if config.rollout.engine == "sglang" else ()  # and of parts
    known = find_spec(f"transformers.models.{model_type}") is not None if model_type else False
    return {
        "default": ("relax_actor.roles.queue",),
        "torch": (
            *TORCH_MODULES,
            *server,
            *((code,) if known else ()),
        ),
    }


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
    hosts: Sequence[Host] = (),
    placement: Placement | None = None,
    address: str = "",
    lease: LeaseTerms = LeaseTerms(),  # noqa: B008 - frozen
    join_timeout_s: float = 120.0,
    fan_out: int = FAN_OUT,
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
        hosts: where actors run, the first of them that of the trainer and the rows; none is this machine.
        placement: where each actor is; None deals the rollouts to the hosts in turn.
        address: where the other hosts reach this program.
        lease: how long a host that does not answer is believed in.
        join_timeout_s: how long all hosts together may take to be there.
        fan_out: how many sessions to other hosts may be on their way at once.

    Raises:
        SpecError: hosts and placement do not fit one another, or what has to be together.
        UnplacedError: the placement says nothing of a rollout.
    """
    if placement is None and len(hosts) > 1:
        placement = homes.spread(config, [host.name for host in hosts])
    control = control or RunControl()
    verdict.clear(folder)
    events = EventLog(folder / "events.jsonl", "head", 1)
    supervisor = Supervisor(
        tree(config, resume=str(resume or ""), placement=placement, env=env, backoff=backoff),
        run_dir=folder,
        run_id=run_id,
        zygotes=zygotes(config),
        shm_root=config.queue.storage_path,
        hosts=hosts,
        address=address,
        lease=lease,
        join_timeout_s=join_timeout_s,
        fan_out=fan_out,
    )
    events.emit(
        "run_started",
        run_id=run_id,
        mode=config.run.mode,
        max_staleness=config.run.max_staleness,
        steps=config.run.steps,
        resumed_from=str(resume or ""),
    )
    supervisor.start()
    try:
        _link_parts(supervisor, config)
        outcome = watch(supervisor, config, control, on_tick)
    finally:
        supervisor.close()
        remove_spilled(supervisor.run_id, folder)
    if outcome.exit_code == 0 and (failure := verdict.find(folder)):
        outcome = Outcome(exit_code=1, reason=failure)
    events.emit("run_ended", exit_code=outcome.exit_code, reason=outcome.reason)
    events.close()
    return outcome


def _link_parts(supervisor: Supervisor, config: Config) -> None:
    """Have a replica over several hosts live and die as one."""
    for replica in range(config.rollout.replicas):
        rollout, *parts = homes.members_of(replica, config.rollout.hosts_per_replica)
        for part in parts:
            supervisor.link(rollout, part)
