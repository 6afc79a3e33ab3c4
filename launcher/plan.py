"""What a launch would start and need, worked out without starting anything.

This is what `relax-actor plan` and `launch --dry-run` print, and what plan.json of a run folder keeps.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from launcher.estimate import Estimate, estimate
from launcher.hostlist import fold
from launcher.hostplan import HostsPlan, plan_hosts, render_hosts
from launcher.modelfolder import model_shape
from launcher.options import LaunchOptions
from launcher.runfolder import RunFolder
from launcher.stalls import Room
from launcher.toml import to_toml
from relax_actor.config import Config
from relax_actor.homes import PART, ROLLOUT
from relax_actor.placement import Placement


class PlannedActor(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of one role."""

    role: str
    replicas: int
    processes_each: int  # the actor's own and its workers
    purpose: str

    @property
    def names(self) -> list[str]:
        """Names of the actors: `trainer`; rollouts and their parts are numbered even where there is one."""
        if self.replicas == 1 and self.role not in {ROLLOUT, PART}:
            return [self.role]
        return [f"{self.role}/{replica}" for replica in range(self.replicas)]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run before it exists."""

    mode: str
    steps: int
    max_staleness: int
    groups_per_batch: int
    samples_per_step: int
    staleness_window_groups: int
    staleness_bound_samples: int  # unfinished or untrained at once, at most
    rows_per_epoch: int
    actors: tuple[PlannedActor, ...]
    estimate: Estimate
    hosts: HostsPlan = HostsPlan()


def make_plan(
    config: Config,
    *,
    rows: int,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008 - frozen
    rooms: Sequence[Room] = (),
    placement: Placement | None = None,
) -> Plan:
    """Work out a plan.

    Args:
        config: checked by `checks.check_config`.
        rows: usable rows of the dataset.
        options: about hosts.
        rooms: what is known of each host; none in an allocation that was not asked yet.
        placement: where each actor goes; None where that is not known yet.

    Raises:
        ValueError: the model folder is not a whole model.
    """
    actors = _actors(config)
    need = estimate(config, model_shape(Path(config.model.path)))
    return Plan(
        mode=config.run.mode,
        steps=config.run.steps,
        max_staleness=config.run.max_staleness,
        groups_per_batch=config.groups_per_batch,
        samples_per_step=config.train.global_batch_size,
        staleness_window_groups=config.staleness_window,
        staleness_bound_samples=config.staleness_window * config.rollout.samples_per_prompt,
        rows_per_epoch=rows,
        actors=actors,
        estimate=need,
        hosts=plan_hosts(options, rooms, placement, [name for actor in actors for name in actor.names], need),
    )


def render(plan: Plan) -> str:
    """Return a plan as text of at most 80 columns."""
    parts = (_render_tree(plan), render_hosts(plan.hosts), _render_loop(plan), _render_memory(plan))
    return "\n\n".join("\n".join(part) for part in parts if part)


def write_plan(plan: Plan, config: Config, folder: RunFolder) -> None:
    """Write plan.json and resolved.toml into an existing run folder."""
    folder.plan.write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    folder.resolved.write_text(to_toml(config), encoding="utf-8", newline="")


def plan_json(plan: Plan) -> str:
    """Return a plan as one JSON object."""
    return json.dumps(msgspec.to_builtins(plan))


def _actors(config: Config) -> tuple[PlannedActor, ...]:
    """Say what `relax_actor.cast.tree` will start, in that order; building that tree imports transformers."""
    workers = config.reward.workers
    return (
        PlannedActor(
            role="queue", replicas=1, processes_each=1, purpose="TransferQueue: prompts and samples"
        ),
        PlannedActor(role="prompts", replicas=1, processes_each=1, purpose="reads and tokenizes the dataset"),
        PlannedActor(
            role="reward",
            replicas=config.reward.replicas,
            processes_each=1 + workers,
            purpose=f"scores by `{config.reward.function}` in {workers} killable process"
            + ("es" if workers > 1 else ""),
        ),
        *_parts(config),
        PlannedActor(
            role="rollout",
            replicas=config.rollout.replicas,
            processes_each=1,
            purpose=f"samples, engine `{config.rollout.engine}`",
        ),
        PlannedActor(
            role="trainer",
            replicas=1,
            processes_each=1,
            purpose=f"trains and publishes, backend `{config.train.backend}`",
        ),
    )


def _parts(config: Config) -> list[PlannedActor]:
    hosts = config.rollout.hosts_per_replica
    count, purpose = config.rollout.replicas * (hosts - 1), f"a rollout's on one more of its {hosts} hosts"
    return [PlannedActor(role=PART, replicas=count, processes_each=1, purpose=purpose)] if count else []


def _render_tree(plan: Plan) -> list[str]:
    total = sum(actor.replicas * actor.processes_each for actor in plan.actors)
    width = max(12, *(len(name) for actor in plan.actors for name in _shown(actor.names)))
    lines = [f"actors ({total} processes, beside the head, its node agent and zygotes)"]
    for actor in plan.actors:
        each = f"{actor.processes_each} process" + ("es" if actor.processes_each > 1 else "")
        lines += [f"  {name:<{width}} {each:<12} {actor.purpose}" for name in _shown(actor.names)]
    return lines


def _shown(names: list[str]) -> list[str]:
    return names if len(names) <= 8 else [fold(names)]


def _render_loop(plan: Plan) -> list[str]:
    per_group = plan.samples_per_step // plan.groups_per_batch
    bound = f"{plan.staleness_bound_samples} samples unfinished or untrained"
    return [
        f"loop ({plan.mode})",
        f"  each step    {plan.samples_per_step} samples: {plan.groups_per_batch} prompts of {per_group}",
        f"  steps        {plan.steps}, over {plan.rows_per_epoch} prompts an epoch",
        f"  staleness    at most {plan.max_staleness} versions, {bound}",
    ]


def _render_memory(plan: Plan) -> list[str]:
    need = plan.estimate
    return [
        f"memory ({need.parameters:,} parameters; activations not counted)",
        f"  trainer      {_size(need.trainer_bytes)}",
        f"  rollout      {_size(need.rollout_bytes)} each",
        f"  shared       {_size(need.policy_bytes)} policy versions, {_size(need.queue_bytes)} queue",
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**27 else f"{size_bytes / 2**20:.1f} MiB"
