"""A whole run: which actors there are, what they owe one another, and how it ends.

Read this file for the shape of the system, `protocol` for what the actors say, `roles/` for what they do.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec

from relax_actor.config import Config
from relax_actor.data.template import PromptEncoder
from relax_actor.devices import CPU, host_gpus, replica_groups, rollout_device, trainer_device
from relax_actor.roles import verdict
from relax_actor.supervision.spec import Backoff, ChildSpec, Intensity, RestartType, SupervisorSpec
from relax_actor.supervision.supervisor import Supervisor
from relax_actor.telemetry import EventLog
from relax_actor.transfer_queue.memory import remove_spilled

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

POLL_S = 0.1

SERVER_START_S = 960.0
"""How long a rollout with a server may take to be ready; the server itself gives up a little sooner."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    exit_code: int  # 0 done, 1 failed, 130 on SIGINT, 143 on SIGTERM
    reason: str


class RunControl:
    """How another thread, or a signal handler, ends a run."""

    def __init__(self) -> None:
        self._stop, self._kill = threading.Event(), threading.Event()
        self.reason = ""

    def stop(self, reason: str) -> None:
        """End in order: each actor gets its time to clean up."""
        self.reason = self.reason or reason
        self._stop.set()

    def kill(self, reason: str) -> None:
        """End now."""
        self.reason = self.reason or reason
        self._kill.set()

    @property
    def stopping(self) -> bool:
        """Whether the run is to end in order."""
        return self._stop.is_set()

    @property
    def killing(self) -> bool:
        """Whether the run is to end now."""
        return self._kill.is_set()


def tree(
    config: Config,
    *,
    resume: str = "",
    hosts: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
) -> SupervisorSpec:
    """Return the run's supervision tree.

    Args:
        config: the run's.
        hosts: the names of all hosts, the trainer's first; empty is this one.
        resume: a checkpoint folder for the first trainer, or empty.
        env: added to the environment of every actor.
        backoff: how soon an actor that died is started again.
    """
    stops = PromptEncoder(Path(config.model.path), config.data).stop_token_ids(config.rollout)
    child = partial(_child, config, dict(env or {}))
    gpus = host_gpus()
    rollouts = SupervisorSpec(
        id="rollouts",
        backoff=backoff,
        # A replica that cannot stay up for a minute on average is not bad luck; two of ten may be.
        intensity=Intensity(restarts=10 * config.rollout.replicas, within_s=600.0),
        # Once that is exceeded the run has failed: starting all of them over would go on for ever.
        restart=RestartType.TEMPORARY,
        significant=True,
        children=(
            msgspec.structs.replace(
                child(
                    "rollout", "Rollout", stop_token_ids=stops, replicas=config.rollout.replicas, indexed=True
                ),
                devices=_rollout_gpus(config, gpus),
                spares=config.rollout.spares,
                claims_devices=config.rollout.spares > 0,
                start_timeout_s=SERVER_START_S if config.rollout.engine == "sglang" else 120.0,
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
    return SupervisorSpec(
        id="run",
        backoff=backoff,
        intensity=Intensity(restarts=10, within_s=600.0),
        auto_shutdown="any",
        children=(
            msgspec.structs.replace(child("queue", "TransferQueue"), zygote="default"),
            child("prompts", "Prompts"),
            child("reward", "Reward", replicas=config.reward.replicas),
            *stores(config, hosts, stages=bool(_rollout_gpus(config, gpus)), env=env),
            rollouts,
            trainer,
        ),
    )


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
    groups = replica_groups(rollout.device, gpus, rollout.tensor_parallel)
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
    server = ("relax_actor.roles.sglang_engine",) if config.rollout.engine == "sglang" else ()
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
    """
    control = control or RunControl()
    verdict.clear(folder)
    events = EventLog(folder / "events.jsonl", "head", 1)
    spec = tree(config, resume=str(resume or ""), env=env, backoff=backoff)
    supervisor = Supervisor(
        spec, run_dir=folder, run_id=run_id, zygotes=zygotes(config), shm_root=config.queue.storage_path
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
        outcome = _watch(supervisor, control, on_tick)
    finally:
        supervisor.close()
        remove_spilled(supervisor.run_id, folder)
    if outcome.exit_code == 0 and (failure := verdict.find(folder)):
        outcome = Outcome(exit_code=1, reason=failure)
    events.emit("run_ended", exit_code=outcome.exit_code, reason=outcome.reason)
    events.close()
    return outcome


def _watch(supervisor: Supervisor, control: RunControl, on_tick: Callable[[], None] | None) -> Outcome:
    told_to_stop = told_to_kill = False
    while (finished := supervisor.wait(POLL_S)) is None:
        if control.killing and not told_to_kill:
            told_to_kill = True
            supervisor.kill(control.reason)
        elif control.stopping and not told_to_stop:
            told_to_stop = True
            supervisor.stop(control.reason)
        if on_tick is not None:
            on_tick()
    if told_to_stop or told_to_kill:
        return Outcome(exit_code=_signal_code(control.reason), reason=f"stopped: {control.reason}")
    return Outcome(exit_code=0 if finished.outcome == "ok" else 1, reason=finished.reason)


def _signal_code(reason: str) -> int:
    return {"SIGINT": 130, "SIGTERM": 143}.get(reason, 1)
