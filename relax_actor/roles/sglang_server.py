"""How a run's SGLang servers are started, in a rollout and in its parts alike."""

import sys
from collections.abc import Iterable
from pathlib import Path

from relax_actor.actor import Context
from relax_actor.config import Config
from relax_actor.devices import visible_names
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.node.names import file_stem
from transport import leavings
from transport.shm import ShmSpace


def server_settings(
    config: Config,
    devices: tuple[str, ...],
    *,
    context_tokens: int,
    reads_text: bool,
    keep_fds: tuple[int, ...] = (),
) -> ServerSettings:
    """Return how a rollout's server is started.

    Args:
        config: the run's.
        devices: torch's names of its GPUs, or the CPU.
        context_tokens: of the model.
        reads_text: whether it looks for stop strings.
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
        nodes=rollout.hosts_per_replica,
        mem_fraction=rollout.mem_fraction,
        deterministic=rollout.deterministic,
        memory_saver=config.run.colocate and bool(visible_names(devices)),
        reads_text=reads_text,
        routed_experts=config.train.use_r3,
        stream_tokens=rollout.chunk_tokens,
        args=rollout.sglang_args,
        env=rollout.sglang_env,
        keep_fds=keep_fds,
        quick_start=rollout.sglang_quick_start,
    )


def remember(context: Context, files: Iterable[Path]) -> None:
    """Write down what has to go when this actor does, for whoever sweeps its segments then."""
    space = ShmSpace(context.run_id, context.shm_root)
    leavings.write_down(space.root / space.name(context.name, context.incarnation, leavings.LABEL), files)


def server_log(context: Context) -> Path:
    """Return where the output of an actor's server goes."""
    return context.run_dir / "logs" / f"{file_stem(context.name, context.incarnation)}.sglang.log"
