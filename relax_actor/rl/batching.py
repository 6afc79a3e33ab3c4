"""How a batch is dealt to optimizer updates and micro-batches. Imports no torch: launchers use it too."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def plan_updates(samples: Sequence[T], *, updates: int, micro_batch_size: int) -> list[list[list[T]]]:
    """Deal a batch to optimizer updates and each update to micro-batches.

    Args:
        samples: in the order to keep; neighbours stay together, so that their prefixes are shared.
        updates: at least 1; sizes differ by one sample at most.
        micro_batch_size: samples, at least 1; the last micro-batch of an update may be smaller.

    Returns:
        Updates of micro-batches of samples; none of them is empty, so a batch smaller than
        `updates` has fewer.

    Raises:
        ValueError: `updates` or `micro_batch_size` is below 1.
    """
    return [micro_batches(part, micro_batch_size) for part in split_evenly(samples, updates) if part]


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


def legal_values_nearby(value: int, divisors: Sequence[int]) -> tuple[int, int]:
    """Return the values around `value` that every one of `divisors` divides; see `nearest_multiples`.

    Raises:
        ValueError: a divisor is below 1.
    """
    for divisor in divisors:
        _require_positive("divisor", divisor)
    return nearest_multiples(value, math.lcm(*divisors))


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
