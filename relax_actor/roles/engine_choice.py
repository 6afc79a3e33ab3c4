"""Which engine a rollout samples with, and how: what the configuration says."""

import json
from pathlib import Path
from typing import Any

from relax_actor.actor import Context
from relax_actor.config import Config
from relax_actor.devices import AUTO, CPU, host_gpus, replica_groups, rollout_device
from relax_actor.engines.base import PLACEHOLDER_IDS, Engine, SamplingParams
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.rl.routing import RouteLayout, layout_of
from relax_actor.roles.claims import claim


def sampling_params(
    config: Config, stop_token_ids: tuple[int, ...], stop_strings: StopStrings | None, *, is_eval: bool
) -> SamplingParams:
    """Say how training prompts, or evaluation prompts, are sampled."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=config.eval.temperature if is_eval else rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
    )


def make_rollout_engine(
    config: Config,
    stop_token_ids: tuple[int, ...],
    context: Context,
    *,
    reads_text: bool = False,
    keep_fds: tuple[int, ...] = (),
) -> tuple[Engine, str]:
    """Make a rollout's engine where its replica belongs; return torch's name of the device, too.

    Args:
        config: the run's.
        stop_token_ids: what ends a sample.
        context: of the rollout.
        reads_text: whether a server looks for stop strings.
        keep_fds: descriptors that a server inherits.
    """
    rollout, gpus = config.rollout, host_gpus()
    if rollout.engine != "sglang":
        device = rollout_device(rollout.device, context.replica, gpus)
        return make_engine(config, stop_token_ids, device), device
    from relax_actor.roles.sglang_engine import make_sglang_engine  # noqa: PLC0415 - only where it is used

    groups = replica_groups(rollout.device, gpus, rollout.gpus_each)
    fds = keep_fds
    if rollout.spares and rollout.device in {AUTO, "cuda"} and groups != [(CPU,)]:  # else one GPU is for all
        # Spares begin at the other end, so that replicas find their own.
        taken = claim(context.run_dir / "gpus", groups, first=-1 if context.is_spare else context.replica)
        devices, fds = taken.devices, (*keep_fds, taken.fd)
    else:
        devices = groups[context.replica % len(groups)]
    _make_current(devices[0])
    engine = make_sglang_engine(config, context, devices, reads_text=reads_text, keep_fds=fds)
    return engine, devices[0]


def make_engine(config: Config, stop_token_ids: tuple[int, ...], device: str = CPU) -> Engine:
    """Make an engine of this process on torch's `device`, which becomes the current one.

    torch is imported only where it is needed.
    """
    if config.rollout.engine == "scripted":
        return _scripted(config, stop_token_ids)
    _make_current(device)
    rollout = config.rollout
    common: dict[str, Any] = {
        "seed": config.run.seed,
        "slots": rollout.max_in_flight,
        "dtype": config.model.dtype,
        "deterministic": rollout.deterministic,
        "threads": rollout.threads,
        "device": device,
    }
    if "vision_config" in model_config(config):
        from relax_actor.engines.vision_engine import VisionEngine  # noqa: PLC0415 - needs torch

        return VisionEngine(Path(config.model.path), **common)
    from relax_actor.engines.transformers_engine import TransformersEngine  # noqa: PLC0415 - needs torch

    return TransformersEngine(Path(config.model.path), **common, record_routes=config.train.use_r3)


def _scripted(config: Config, stop_token_ids: tuple[int, ...]) -> Engine:
    from relax_actor.engines.scripted import ScriptedEngine  # noqa: PLC0415 - the other one needs torch

    return ScriptedEngine(
        seed=config.run.seed,
        slots=config.rollout.max_in_flight,
        vocab=scripted_vocabulary(config, stop_token_ids),
        stop_token_id=stop_token_ids[0],
        token_s=config.rollout.scripted_token_s,
    )


def route_layout(config: Config) -> RouteLayout | None:
    """Return what the routed experts of the model look like; None where nobody wants them.

    Raises:
        UnsupportedRoutingError: they are wanted of a model that has none, or of an unknown kind.
    """
    return layout_of(model_config(config)) if config.train.use_r3 else None


def _make_current(device: str) -> None:
    if device != CPU:
        import torch  # noqa: PLC0415 - only where there are GPUs

        torch.cuda.set_device(device)


def scripted_vocabulary(config: Config, stop_token_ids: tuple[int, ...]) -> list[int]:
    """Return the tokens that the scripted engine may emit: neither stops nor placeholders."""
    model = model_config(config)
    reserved: set[int | None] = set(stop_token_ids)
    if "vision_config" in model:
        reserved |= {model.get(name) for name in (*PLACEHOLDER_IDS, "pad_token_id")}
    return [token for token in range(model["vocab_size"]) if token not in reserved]


def model_config(config: Config) -> dict[str, Any]:
    """Read the model's config.json; where it is one of several models, the text model's values come first."""
    content: dict[str, Any] = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
    return {**content, **(content.get("text_config") or {})}
