"""What one training step reports: sums over its micro-batches, turned into means."""

import math
import time
from typing import Any

from relax_actor.rl.apart import merged_versions
from relax_actor.trainers.base import MicrobatchStats, UpdateStats

ALARM_EVERY_S = 60.0


class StepStats:
    """Gathers the statistics of one step, from when the trainer begins to wait for its batch."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._waited_s = 0.0
        self._turn_s: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was trained: the batch begins again."""
        self._parts: list[MicrobatchStats] = []
        self._updates: list[UpdateStats] = []
        self._loss = self._pending_loss = 0.0

    def waited(self, seconds: float) -> None:
        """Take a time in which the trainer had nothing to train on."""
        self._waited_s += seconds

    def turn(self, **seconds: float) -> None:
        """Take how long a part of a turn on the GPU took."""
        self._turn_s |= {name: round(each, 4) for name, each in seconds.items()}

    def add(self, part: MicrobatchStats) -> None:
        """Take the sums of one micro-batch."""
        self._parts.append(part)
        self._pending_loss += part.loss

    def updated(self, update: UpdateStats) -> None:
        """Take what one optimizer update did."""
        self._updates.append(update)
        self._loss += self._pending_loss * update.loss_factor
        self._pending_loss = 0.0

    @property
    def mismatch_abs(self) -> float:
        """Mean difference of trainer's and rollout's log-probs, in nats; 0 where nothing was trained."""
        return sum(part.mismatch_abs_sum for part in self._parts) / self._tokens

    def mismatch_fields(self) -> dict[str, Any]:
        """Return how far trainer and rollout are apart, all tokens together and by policy version."""
        merged = merged_versions(part.by_version for part in self._parts)
        return {
            "mismatch_abs": self.mismatch_abs,
            "mismatch_k3": sum(part.mismatch_k3_sum for part in self._parts) / self._tokens,
            "max_ratio": max((part.max_ratio for part in self._parts), default=1.0),
            "mismatch_by_version": {str(version): found.means() for version, found in merged.items()},
        }

    @property
    def _tokens(self) -> int:
        return max(1, sum(part.tokens for part in self._parts))

    def fields(self, *, skipped: str = "") -> dict[str, Any]:
        """Return the step's fields for the event log; means are per trained token.

        Args:
            skipped: why the whole step was skipped.
        """
        tokens = self._tokens
        train_s = time.monotonic() - self._started - self._waited_s - sum(self._turn_s.values())
        return {
            "loss": self._loss / max(1, len(self._updates)),
            "grad_norm": max((update.grad_norm for update in self._updates), default=0.0),
            "learning_rate": self._updates[-1].learning_rate if self._updates else 0.0,
            "clip_frac": sum(part.clipped_tokens for part in self._parts) / tokens,
            "kl": sum(part.kl_sum for part in self._parts) / tokens,
            "entropy": sum(part.entropy_sum for part in self._parts) / tokens,
            **self.mismatch_fields(),
            **self._routing_fields(),
            "tokens_per_s": tokens / train_s if train_s > 0 else 0.0,
            "wait_s": self._waited_s,
            "train_s": train_s,
            **self._turn_s,
            "skipped": skipped or "; ".join(update.skipped for update in self._updates if update.skipped),
        }

    def _routing_fields(self) -> dict[str, float]:
        """Return the share of places that the trainer would have routed elsewhere, if any were compared."""
        places = sum(part.routed_places for part in self._parts)
        return (
            {"routing_mismatch_frac": sum(part.routed_apart for part in self._parts) / places}
            if places
            else {}
        )


class Alarm:
    """Rings when a value is above its limit, not more often than once a minute.

    Args:
        limit: 0 never rings.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._next_s = limit, -math.inf

    def rings(self, value: float, now_s: float) -> bool:
        """Whether to tell somebody now."""
        if not self._limit or value <= self._limit or now_s < self._next_s:
            return False
        self._next_s = now_s + ALARM_EVERY_S
        return True
