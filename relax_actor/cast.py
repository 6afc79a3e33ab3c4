"""Who is in a run: its supervision tree, in the order data flows, with a function below for each role.

This is the only place where roles meet. A role's function says who restarts its actors, how many there are
and on which devices; on which hosts is said by `homes`. The actors themselves are in `roles/`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from relax_actor import homes
from relax_actor.config import Config
from relax_actor.data.template import PromptEncoder
from relax_actor.devices import host_gpus, rollout_gpus, trainer_gpus
from relax_actor.homes import LoopHosts
from relax_actor.placement import Placement
from relax_actor.supervision.spec import Backoff, ChildSpec, Elastic, Intensity, RestartType, SupervisorSpec

__all__ = ["stores", "tree"]

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
    basis = _basis(config, placement, env, backoff)
    spec = SupervisorSpec(
        id="run",
        backoff=backoff,
        intensity=Intensity(restarts=10, within_s=600.0),
        auto_shutdown="any",
        children=(
            _queue(basis),
            *_dock(basis),
            _prompts(basis),
            _reward(basis),
            *_stores(basis),
            _rollouts(basis),
            _trainer(basis, resume),
        ),
    )
    return spec if placement is None else homes.settled_tree(spec, placement)


class _Basis(msgspec.Struct, frozen=True, kw_only=True):
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


def _basis(
    config: Config, placement: Placement | None, env: Mapping[str, str] | None, backoff: Backoff
) -> _Basis:
    hosts = LoopHosts()
    homes.check_replicas(config, placement)
    if placement is not None:
        homes.check(placement)
        config, hosts = homes.on_devices(config, placement), homes.loop_hosts(placement)
    return _Basis(
        config=config,
        placement=placement,
        hosts=hosts,
        gpus=host_gpus(),
        env=dict(env or {}),
        backoff=backoff,
    )


def _queue(basis: _Basis) -> ChildSpec:
    """Return who has the samples and knows what became of each: roles/queue.py."""
    return msgspec.structs.replace(_child(basis, "queue", "TransferQueue"), zygote="default")


def _dock(basis: _Basis) -> list[ChildSpec]:
    """Return who brings rows from host to host, where there are actors that need it: roles/dock.py."""
    if basis.placement is None or not homes.crosses_hosts(basis.placement):
        return []
    return [ChildSpec(id="dock", actor="relax_actor.roles.dock:RowDock", env=basis.env)]


def _prompts(basis: _Basis) -> ChildSpec:
    """Return who puts the prompts that the queue wants: roles/prompts.py."""
    return _child(basis, "prompts", "Prompts")


def _reward(basis: _Basis) -> ChildSpec:
    """Return who has samples scored: roles/reward.py."""
    return _child(basis, "reward", "Reward", hosts=basis.hosts, replicas=basis.config.reward.replicas)


def _stores(basis: _Basis) -> list[ChildSpec]:
    """Return who has the policy versions on each host: roles/store.py."""
    return stores(basis.config, tuple(basis.hosts.stores), stages=bool(basis.rollout_gpus), env=basis.env)


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


def _rollouts(basis: _Basis) -> SupervisorSpec:
    """Return who samples, under a supervisor of their own: roles/rollout.py."""
    rollout = basis.config.rollout
    encoder = PromptEncoder(Path(basis.config.model.path), basis.config.data)
    strings = encoder.stop_strings(rollout)
    replicas = _child(
        basis,
        "rollout",
        "Rollout",
        stop_token_ids=encoder.stop_token_ids(rollout),
        stop_strings=strings,
        hosts=basis.hosts,
        replicas=rollout.replicas,
    )
    return SupervisorSpec(
        id="rollouts",
        backoff=basis.backoff,
        # A replica that cannot stay up for a minute on average is not bad luck; two of ten may be.
        intensity=Intensity(restarts=10 * rollout.replicas * rollout.hosts_per_replica, within_s=600.0),
        # Once that is exceeded the run has failed: starting all of them over would go on for ever.
        restart=RestartType.TEMPORARY,
        significant=True,
        children=(
            *_parts(basis, reads_text=bool(strings)),  # before the rollouts, which ask them to start
            msgspec.structs.replace(
                replicas,
                always_indexed=True,
                devices=basis.rollout_gpus,
                spares=rollout.spares,
                claims_devices=rollout.spares > 0,
                elastic=_elastic(basis.config),
                start_timeout_s=_rollout_start_s(basis.config),
            ),
        ),
    )


def _parts(basis: _Basis, *, reads_text: bool) -> list[ChildSpec]:
    """Return what replicas have on their further hosts, if they are spread over several: roles/part.py."""
    rollout = basis.config.rollout
    count = rollout.replicas * (rollout.hosts_per_replica - 1)
    parts = [_child(basis, homes.PART, "Part", reads_text=reads_text, replicas=count)] if count else []
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


def _trainer(basis: _Basis, resume: str) -> ChildSpec:
    """Return who learns from the samples and publishes policy versions: roles/trainer.py."""
    return msgspec.structs.replace(
        _child(basis, "trainer", "Trainer", resume=resume),
        restart=RestartType.TRANSIENT,
        significant=True,  # the run ends when training does
        shutdown_s=basis.config.run.grace_s,
        devices=trainer_gpus(basis.config.train.device, basis.gpus),
    )


def _child(basis: _Basis, role: str, actor: str, *, replicas: int = 1, **args: object) -> ChildSpec:
    """Return the spec of a role's actors; every role's constructor takes the configuration."""
    return ChildSpec(
        id=role,
        actor=f"relax_actor.roles.{role}:{actor}",
        args={"config": basis.config, **args},
        replicas=replicas,
        zygote="torch",
        env=basis.env,
    )
