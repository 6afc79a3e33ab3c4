"""How a batch is dealt to optimizer updates and micro-batches. Imports no torch: launchers use it too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cut(Generic[T]):
    """Where micro-batches begin and end; samples stay in order, so that neighbours share their prefixes.

    Args:
        size: samples of a micro-batch, at least 1.
        max_tokens: if not 0, bounds them instead of `size`: as few micro-batches as that allows, of about as
            many tokens each. Only a single sample may have more.
        tokens: how many a sample has.

    Raises:
        ValueError: `size` is below 1.
    """

    size: int
    max_tokens: int = 0
    tokens: Callable[[T], int]

    def __post_init__(self) -> None:
        _require_positive("micro-batch size", self.size)

    def all(self, samples: Sequence[T]) -> list[list[T]]:
        """Cut all there are; none of the micro-batches is empty."""
        if not self.max_tokens:
            return micro_batches(samples, self.size)
        return balanced_by_tokens(samples, list(map(self.tokens, samples)), self.max_tokens)

    def full(self, samples: Sequence[T]) -> tuple[list[list[T]], list[T]]:
        """Return the micro-batches that no further sample would join, and what is left.

        They depend on the samples and their order alone, not on how many come at once.
        """
        if self.max_tokens:
            *full, rest = filled_by_tokens(samples, list(map(self.tokens, samples)), self.max_tokens) or [[]]
            return full, rest
        whole = len(samples) - len(samples) % self.size
        return micro_batches(samples[:whole], self.size), list(samples[whole:])


def plan_updates(samples: Sequence[T], *, updates: int, cut: Cut[T]) -> list[list[list[T]]]:
    """Deal a batch to optimizer updates and each update to micro-batches.

    Args:
        samples: in the order to keep.
        updates: at least 1; sizes differ by one sample at most.
        cut: how an update is cut.

    Returns:
        Updates of micro-batches of samples; none of them is empty, so a batch smaller than
        `updates` has fewer.

    Raises:
        ValueError: `updates` is below 1.
    """
    return [cut.all(part) for part in split_evenly(samples, updates) if part]


def filled_by_tokens(samples: Sequence[T], tokens: Sequence[int], limit: int) -> list[list[T]]:
    """Cut into runs of at most `limit` tokens, each as long as that allows; a larger sample is alone."""
    runs: list[list[T]] = []
    held = 0
    for sample, count in zip(samples, tokens, strict=True):
        if not runs or held + count > limit:
            runs.append([])
            held = 0
        runs[-1].append(sample)
        held += count
    return runs


def balanced_by_tokens(samples: Sequence[T], tokens: Sequence[int], limit: int) -> list[list[T]]:
    """Cut into as few runs as `filled_by_tokens`, and so that the largest of them is as small as can be."""
    low, high = 1, limit
    fewest = len(filled_by_tokens(samples, tokens, limit))
    while low < high:
        middle = (low + high) // 2
        if len(filled_by_tokens(samples, tokens, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    return filled_by_tokens(samples, tokens, high)


def split_evenly(samples: Sequence[T], parts: int) -> list[list[T]]:
    """Cut into `parts` runs whose sizes differ by one at most; the order is kept.

    Raises:
        ValueError: `parts` is below 1.
    """
    _require_positive("parts", parts)
    borders = [len(samples) * part // parts for part in range(parts + 1)]
    return [list(samples[start:end]) for start, end in pairwise(borders)]


def micro_batches(samples: Sequence[T], size: int) -> list[list[T]]:
    """Cut into runs of `size` samples, the last one perhaps shorter; the order is kept.

    Raises:
        ValueError: `size` is below 1.
    """
    _require_positive("micro-batch size", size)
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def nearest_multiples(value: int, multiple: int) -> tuple[int, int]:
    """Return the legal values around an illegal one, for an error's hint.

    Args:
        value: what was asked for.
        multiple: of what it must be a multiple, at least 1.

    Returns:
        The largest positive multiple not above `value` and the smallest not below; both are
        `multiple` where `value` is smaller than that.

    Raises:
        ValueError: `multiple` is below 1.
    """
    _require_positive("multiple", multiple)
    lower = max(1, value // multiple) * multiple
    upper = max(1, -(-value // multiple)) * multiple
    return lower, upper


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
