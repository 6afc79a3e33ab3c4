"""How much memory a run will take, from the model's headers and the configuration."""

import msgspec

from launcher.modelfolder import ModelShape
from relax_actor.config import Config

POLICY_COPIES = 3
"""Policy versions in shared memory at once: one staged, one served, one still being read."""

TRAINER_BYTES_PER_PARAMETER = 16
"""float32 master weight, its gradient and Adam's two moments."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a run needs at its peak, activations of the trainer not counted."""

    parameters: int
    trainer_bytes: int
    rollout_bytes: int  # one replica: weights, and keys and values of max_in_flight samples
    policy_bytes: int  # queue.storage_path, too
    queue_bytes: int  # queue.storage_path


def estimate(config: Config, shape: ModelShape) -> Estimate:
    """Return what a run of this model needs."""
    value_bytes = _DTYPE_BYTES[config.model.dtype]
    weights = shape.parameters * value_bytes
    computing = weights if config.model.dtype != "float32" else 0
    prompt = config.data.max_prompt_tokens or min(shape.context_tokens or 1024, 1024)
    cached_tokens = config.rollout.max_in_flight * (prompt + config.rollout.max_new_tokens)
    return Estimate(
        parameters=shape.parameters,
        trainer_bytes=shape.parameters * TRAINER_BYTES_PER_PARAMETER + computing,
        rollout_bytes=weights + cached_tokens * shape.kv_values_per_token * value_bytes,
        policy_bytes=weights * POLICY_COPIES,
        queue_bytes=int(config.queue.max_size_gb * 2**30),
    )
