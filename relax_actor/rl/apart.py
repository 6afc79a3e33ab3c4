"""How far trainer and rollout are apart, as numbers to be added up; `offpolicy` measures them. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far the trainer's log-probs are from the rollout's; sums over tokens."""

    abs_sum: float  # |trainer - rollout|
    k3_sum: float  # estimate of KL(rollout || trainer), in nats
    max_ratio: float  # largest trainer / rollout, at most e^20
    tokens: int = 0

    def plus(self, other: "Mismatch") -> "Mismatch":
        """Return that of the tokens of both."""
        return Mismatch(
            abs_sum=self.abs_sum + other.abs_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            max_ratio=max(self.max_ratio, other.max_ratio),
            tokens=self.tokens + other.tokens,
        )

    def means(self) -> dict[str, float]:
        """Return how many tokens there are, and the means over them."""
        tokens = max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "abs": self.abs_sum / tokens,
            "k3": self.k3_sum / tokens,
            "max_ratio": self.max_ratio,
        }


def merged_versions(parts: Iterable[Mapping[int, Mismatch]]) -> dict[int, Mismatch]:
    """Return what was measured of each policy version in several parts, versions ascending."""
    merged: dict[int, Mismatch] = {}
    for part in parts:
        for version, found in part.items():
            merged[version] = merged[version].plus(found) if version in merged else found
    return dict(sorted(merged.items()))
