"""Reward functions as a user might write them: good, lazy and broken ones."""

import json
import math
import os
import time
import zlib
from pathlib import Path
from typing import Any


def varied(*, response: str, label: str) -> float:
    """Return 0 or 1, as good as random but the same for the same text: every group has a signal."""
    return float(zlib.crc32(f"{label}:{response}".encode()) % 2)


def unhurried(*, response: str, label: str, group_id: int, extra: dict[str, Any]) -> float:
    """Take a while for each sample from a group on, until a file is there: a run does not end before that."""
    if group_id >= extra["slow_from"] and not Path(extra["until"]).exists():
        time.sleep(0.25)
    return varied(response=response, label=label)


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


def vowels(*, response: str, group_id: int, sample_index: int) -> float:
    """Return the share of vowels; also write every sample down where the environment asks for it."""
    if path := os.environ.get("REWARD_LOG"):
        line = json.dumps({"key": f"{group_id}/{sample_index}", "response": response}) + "\n"
        with Path(path).open("a") as log:
            log.write(line)
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))
