"""What one training step reports: sums over its micro-batches, turned into means."""

import time

from relax_actor.trainers.base import MicrobatchStats, UpdateStats


class StepStats:
    """Gathers the statistics of one step.

    Args:
        waited_s: how long the trainer waited for the batch.
    """

    def __init__(self, waited_s: float) -> None:
        self._started = time.monotonic()
        self._waited_s = waited_s
        self._parts: list[MicrobatchStats] = []
        self._updates: list[UpdateStats] = []

    def add(self, part: MicrobatchStats) -> None:
        """Take the sums of one micro-batch."""
        self._parts.append(part)

    def updated(self, update: UpdateStats) -> None:
        """Take what one optimizer update did."""
        self._updates.append(update)

    def fields(self, *, skipped: str = "") -> dict[str, float | str]:
        """Return the step's fields for the event log; means are per trained token.

        Args:
            skipped: why the whole step was skipped.
        """
        tokens = max(1, sum(part.tokens for part in self._parts))
        train_s = time.monotonic() - self._started
        return {
            "loss": sum(part.loss for part in self._parts) / max(1, len(self._updates)),
            "grad_norm": max((update.grad_norm for update in self._updates), default=0.0),
            "learning_rate": self._updates[-1].learning_rate if self._updates else 0.0,
            "clip_frac": sum(part.clipped_tokens for part in self._parts) / tokens,
            "kl": sum(part.kl_sum for part in self._parts) / tokens,
            "mismatch_abs": sum(part.mismatch_abs_sum for part in self._parts) / tokens,
            "mismatch_k3": sum(part.mismatch_k3_sum for part in self._parts) / tokens,
            "max_ratio": max((part.max_ratio for part in self._parts), default=1.0),
            "tokens_per_s": tokens / train_s if train_s > 0 else 0.0,
            "wait_s": self._waited_s,
            "train_s": train_s,
            "skipped": skipped or "; ".join(update.skipped for update in self._updates if update.skipped),
        }
