"""The engine `sglang` of a rollout: its server, its weights' way and its place, out of the configuration."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from relax_actor.actor import Context
from relax_actor.config import Config
from relax_actor.devices import visible_names
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.capabilities import Capabilities
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.weights import Updater, UpdateSettings, WeightPlacement
from relax_actor.engines.sglang.weights.disk import SharedMemoryFiles
from relax_actor.model_files import weight_names
from relax_actor.node.names import file_stem
from relax_actor.roles.engine_choice import model_config, route_layout
from transport import leavings
from transport.shm import ShmSpace

GROUPS_OF_PATIENCE = 2
"""A request may take so many times as long as a group has in the queue: then nobody waits for it any more."""


def make_sglang_engine(
    config: Config, context: Context, devices: tuple[str, ...], *, keep_fds: tuple[int, ...] = ()
) -> SglangEngine:
    """Start a server and return when it serves.

    Args:
        config: the run's.
        context: of the rollout.
        devices: torch's names of the GPUs it has, or the CPU.
        keep_fds: descriptors that stay open as long as the server lives.
    """
    model, rollout, routes = model_config(config), config.rollout, route_layout(config)
    return SglangEngine(
        server_settings(config, devices, context_tokens=model["max_position_embeddings"], keep_fds=keep_fds),
        GenerationSettings(
            seed=config.run.seed,
            deterministic=rollout.deterministic,
            stream=rollout.chunk_tokens > 0,
            expert_shape=None if routes is None else (routes.layers, routes.top_k),
            deadline_s=GROUPS_OF_PATIENCE * max(config.queue.group_deadline_s, rollout.lease_s),
        ),
        lambda client, found: _updater(config, context, devices, client, found),
        vocabulary=model["vocab_size"],
        names=weight_names(Path(config.model.path)),
        log=context.run_dir / "logs" / f"{file_stem(context.name, context.incarnation)}.sglang.log",
        update_mode=rollout.update_mode,
        health_s=rollout.health_s,
        around=Surroundings(
            wake=context.wake,
            progress=context.progress,
            emit=context.events.emit,
            remember=lambda files: _remember(context, files),
            gone=lambda what: _end_spare(context, what),
        ),
    )


def server_settings(
    config: Config, devices: tuple[str, ...], *, context_tokens: int, keep_fds: tuple[int, ...] = ()
) -> ServerSettings:
    """Return how a rollout's server is started.

    Args:
        config: the run's.
        devices: torch's names of its GPUs, or the CPU.
        context_tokens: of the model.
        keep_fds: see `make_sglang_engine`.
    """
    rollout = config.rollout
    return ServerSettings(
        model=config.model.path,
        python=rollout.sglang_python or sys.executable,
        context_tokens=context_tokens,
        slots=rollout.max_in_flight,
        seed=config.run.seed,
        dtype=config.model.dtype,
        gpus=visible_names(devices),
        tp=rollout.tensor_parallel,
        mem_fraction=rollout.mem_fraction,
        deterministic=rollout.deterministic,
        memory_saver=config.run.colocate and bool(visible_names(devices)),
        routed_experts=config.train.use_r3,
        stream_tokens=rollout.chunk_tokens,
        args=rollout.sglang_args,
        env=rollout.sglang_env,
        keep_fds=keep_fds,
        quick_start=rollout.sglang_quick_start,
    )


def _remember(context: Context, files: Iterable[Path]) -> None:
    """Write down what has to go when this actor does, for whoever sweeps its segments then."""
    space = ShmSpace(context.run_id, context.shm_root)
    leavings.write_down(space.root / space.name(context.name, context.incarnation, leavings.LABEL), files)


def _end_spare(context: Context, what: str) -> None:
    """End a spare whose server has died: it takes no turns, so nobody would see it before it is needed."""
    if context.is_spare:
        sys.stderr.write(f"{what}\n")
        sys.stderr.flush()
        os._exit(1)


def _updater(
    config: Config, context: Context, devices: tuple[str, ...], client: Client, found: Capabilities
) -> Updater:
    folder = context.run_dir / "sglang"
    scratch = folder / file_stem(context.name, context.incarnation)
    scratch.mkdir(parents=True, exist_ok=True)
    _remember(context, [scratch])
    settings = UpdateSettings(
        bucket_bytes=config.rollout.sglang_bucket_bytes,
        verify=config.rollout.verify,
        digests=folder / f"digests-{context.run_id}",
        model_path=Path(config.model.path),
        scratch=scratch,
    )
    placement = WeightPlacement(device=devices[0], server_devices=devices, ranks=found.tp)
    files = (SharedMemoryFiles(ShmSpace(context.run_id, context.shm_root)),)
    return Updater(client, found, settings, placement=placement, files=files)
