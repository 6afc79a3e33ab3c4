"""Reward functions as a user might write them: good, lazy and broken ones."""

import math
import zlib


def varied(*, response: str, label: str) -> float:
    """Return 0 or 1, as good as random but the same for the same text: every group has a signal."""
    return float(zlib.crc32(f"{label}:{response}".encode()) % 2)


def equal() -> float:
    """Say the same of everything."""
    return 1.0


def broken() -> float:
    """Fail on everything."""
    raise ValueError("no reward for anybody")


def moody(*, response: str, label: str, group_id: int, sample_index: int) -> float | None:
    """Fail in a new way in each of the first five groups, once; on everything in the sixth."""
    if sample_index == 1:
        _misbehave(group_id)
    if group_id == 5:
        raise RuntimeError("nothing of this group")
    return {2: None, 3: math.nan, 4: math.inf}.get(
        group_id if sample_index == 1 else -1, varied(response=response, label=label)
    )


def _misbehave(group_id: int) -> None:
    if group_id == 0:
        raise ValueError("not this one")
    while group_id == 1:  # for ever
        pass
