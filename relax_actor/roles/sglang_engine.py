"""The engine `sglang` of a rollout: its server, its weights' way and its place, out of the configuration."""

import os
import sys
from pathlib import Path

import msgspec

from relax_actor.actor import Context
from relax_actor.config import Config
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.capabilities import Capabilities
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.errors import StartError
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.weights import Updater, UpdateSettings, WeightPlacement
from relax_actor.engines.sglang.weights.disk import SharedMemoryFiles
from relax_actor.model_files import weight_names
from relax_actor.node.names import file_stem
from relax_actor.roles.engine_choice import model_config, route_layout
from relax_actor.roles.parts import Parts
from relax_actor.roles.sglang_server import remember, server_log, server_settings
from transport.shm import ShmSpace

GROUPS_OF_PATIENCE = 2
"""A request may take so many times as long as a group has in the queue: then nobody waits for it any more."""


def make_sglang_engine(
    config: Config,
    context: Context,
    devices: tuple[str, ...],
    *,
    reads_text: bool,
    keep_fds: tuple[int, ...] = (),
) -> SglangEngine:
    """Start a server and return when it serves.

    Args:
        config: the run's.
        context: of the rollout.
        devices: torch's names of the GPUs it has, or the CPU.
        reads_text: whether it looks for stop strings.
        keep_fds: descriptors that stay open as long as the server lives.

    Raises:
        StartError: it did not come up, or a part of the replica on another host did not.
    """
    parts = Parts(context, config.rollout.hosts_per_replica)
    server = server_settings(
        config,
        devices,
        context_tokens=model_config(config)["max_position_embeddings"],
        reads_text=reads_text,
        keep_fds=keep_fds,
    )
    parts.start()  # before the first node's server, which waits for theirs
    try:
        engine = _engine(config, context, devices, server, parts)
    except StartError as error:
        raise parts.explained(error) from error
    parts.watch()
    return engine


def _engine(
    config: Config, context: Context, devices: tuple[str, ...], server: ServerSettings, parts: Parts
) -> SglangEngine:
    rollout, routes = config.rollout, route_layout(config)
    return SglangEngine(
        msgspec.structs.replace(server, meeting=parts.meeting, address=context.listen),
        GenerationSettings(
            seed=config.run.seed,
            deterministic=rollout.deterministic,
            stream=rollout.chunk_tokens > 0,
            expert_shape=None if routes is None else (routes.layers, routes.top_k),
            deadline_s=GROUPS_OF_PATIENCE * max(config.queue.group_deadline_s, rollout.lease_s),
        ),
        lambda client, found: _updater(config, context, devices, client, found),
        vocabulary=model_config(config)["vocab_size"],
        names=weight_names(Path(config.model.path)),
        log=server_log(context),
        update_mode=rollout.update_mode,
        health_s=rollout.health_s,
        around=_surroundings(context, parts),
    )


def _surroundings(context: Context, parts: Parts) -> Surroundings:
    def progress(text: str) -> None:
        parts.check()  # nothing else would end the wait for a part that has gone
        context.progress(text)

    return Surroundings(
        wake=context.wake,
        progress=progress,
        emit=context.events.emit,
        remember=lambda files: remember(context, files),
        gone=lambda what: _end_spare(context, what),
        closing=parts.end,
    )


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
    remember(context, [scratch])
    settings = UpdateSettings(
        bucket_bytes=config.rollout.sglang_bucket_bytes,
        verify=config.rollout.verify,
        digests=folder / f"digests-{context.run_id}",
        model_path=Path(config.model.path),
        scratch=scratch,
    )
    placement = WeightPlacement(
        device=devices[0],
        server_devices=devices,
        ranks=found.tp,
        hosts=config.rollout.hosts_per_replica,
        address=context.listen or "127.0.0.1",
    )
    files = (SharedMemoryFiles(ShmSpace(context.run_id, context.shm_root)),)
    return Updater(client, found, settings, placement=placement, files=files)
