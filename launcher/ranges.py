"""Which values each numeric field may take."""

from collections.abc import Callable
from typing import Any

import msgspec


class Range(msgspec.Struct, frozen=True):
    """A condition on one value, and its words in an error: "must be …"."""

    words: str
    holds: Callable[[Any], bool]


_ONE = Range("1 or more", lambda value: value >= 1)
_TWO = Range("2 or more, since a group of one has no baseline", lambda value: value >= 2)
_ZERO = Range("0 or more", lambda value: value >= 0)
_ABOVE = Range("above 0", lambda value: value > 0)
_FRACTION = Range("between 0 and 1", lambda value: 0 <= value <= 1)
_BETAS = Range("two numbers from 0 to below 1", lambda pair: all(0 <= beta < 1 for beta in pair))
_IDS = Range("token ids, 0 or more", lambda ids: all(token >= 0 for token in ids))
_NAME = Range(
    "a name of a folder: not empty, without `/`",
    lambda name: bool(name.strip()) and "/" not in name and "\0" not in name,
)

RANGES: dict[str, Range] = {
    "run.name": _NAME,
    "run.max_staleness": _ZERO,
    "run.steps": _ONE,
    "run.seed": _ZERO,
    "run.grace_s": _ABOVE,
    "run.colocate_sleep_s": _ABOVE,
    "data.max_prompt_tokens": _ZERO,
    "rollout.replicas": _ONE,
    "rollout.min_replicas": _ONE,
    "rollout.max_replicas": _ZERO,
    "rollout.samples_per_prompt": _TWO,
    "rollout.max_new_tokens": _ONE,
    "rollout.temperature": _ZERO,
    "rollout.top_p": _FRACTION,
    "rollout.top_k": _ZERO,
    "rollout.stop_token_ids": _IDS,
    "rollout.max_in_flight": _ONE,
    "rollout.threads": _ONE,
    "rollout.lease_s": _ABOVE,
    "rollout.chunk_tokens": _ZERO,
    "rollout.scripted_token_s": _ZERO,
    "rollout.tensor_parallel": _ONE,
    "rollout.hosts_per_replica": _ONE,
    "rollout.mem_fraction": _FRACTION,
    "rollout.spares": _ZERO,
    "rollout.health_s": _ABOVE,
    "rollout.sglang_bucket_bytes": _ONE,
    "reward.replicas": _ONE,
    "reward.workers": _ONE,
    "reward.timeout_s": _ABOVE,
    "reward.lease_s": _ABOVE,
    "train.global_batch_size": _ONE,
    "train.micro_batch_size": _ONE,
    "train.max_tokens_per_micro_batch": _ZERO,
    "train.updates_per_batch": _ONE,
    "train.learning_rate": _ABOVE,
    "train.min_lr_frac": _FRACTION,
    "train.warmup_steps": _ZERO,
    "train.weight_decay": _ZERO,
    "train.adam_betas": _BETAS,
    "train.max_grad_norm": _ABOVE,
    "train.clip_low": _FRACTION,
    "train.clip_high": _ABOVE,
    "train.kl_coef": _ZERO,
    "train.tis_max": _ZERO,
    "train.threads": _ONE,
    "train.checkpoint_every": _ZERO,
    "train.keep_checkpoints": _ONE,
    "train.lease_s": _ABOVE,
    "train.r3_tolerance_frac": _FRACTION,
    "train.mismatch_alarm": _ZERO,
    "queue.max_size_gb": _ABOVE,
    "queue.min_valid_samples": _ONE,
    "queue.max_attempts": _ONE,
    "queue.group_deadline_s": _ABOVE,
    "queue.over_sampling": _ONE,
    "queue.max_refills": _ZERO,
    "queue.partial_rollout_timeout_s": _ABOVE,
    "dcs.keep": _ONE,
    "dcs.bucket_bytes": _ONE,
    "dcs.budget_bytes": _ZERO,
    "dcs.gpu_snapshots": _ZERO,
    "dcs.patience_s": _ABOVE,
    "eval.every": _ZERO,
    "eval.samples_per_prompt": _ONE,
    "eval.max_prompts": _ZERO,
    "eval.temperature": _ZERO,
}
