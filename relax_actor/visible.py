"""What CUDA_VISIBLE_DEVICES, and lists like it, mean: names of GPUs that nobody takes apart. Pure.

A name is an index, or a UUID of a GPU or of a MIG slice; it travels as it was written from the list to the
actor's own CUDA_VISIBLE_DEVICES, and never through `int()`. The rules are CUDA's: the list ends before the
first entry that is none (`-1`, a stray word), spaces do not count, and a list that names one twice is empty.
"""

import re
from collections.abc import Mapping

_INDEX = re.compile(r"\d+", re.ASCII)
_UUIDS = ("GPU-", "MIG-")

LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
"""Variables that name GPUs, the first that is set counts; under Slurm the last is renumbered from 0."""


def visible_gpus(text: str | None) -> tuple[str, ...] | None:
    """Return the GPUs that a list leaves visible, in its order.

    Args:
        text: such as `0,2` or `GPU-3f1b,GPU-77c0`; None where the variable is not set.

    Returns:
        None where all are visible; an empty tuple where none is.
    """
    if text is None:
        return None
    kind = next((prefix for prefix in _UUIDS if text.strip().startswith(prefix)), "")
    gpus: list[str] = []
    for item in text.split(","):
        name = item.strip()
        if not (name.startswith(kind) if kind else _INDEX.fullmatch(name)):
            break
        if name in gpus:
            return ()
        gpus.append(name)
    return tuple(gpus)


def oddity(text: str) -> str:
    """Return what CUDA silently drops from a list, in words; empty where it takes all of it."""
    items = [item.strip() for item in text.split(",")]
    gpus = visible_gpus(text) or ()
    if len(gpus) == len(items) or text.strip() in {"", "-1", "NoDevFiles"}:
        return ""
    if not gpus and len(set(items)) < len(items):
        return f"`{text}` names a GPU twice, so none is visible"
    return f"`{text}` ends at `{items[len(gpus)]}`, so {', '.join(gpus) or 'none'} is visible"


def scheduled_gpus(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that a scheduler gave to this host's task; None where it says nothing.

    Ranges such as `0-3`, which Slurm writes, are expanded.

    Args:
        env: of the task.
    """
    for name in LISTS[:-1]:
        if (text := env.get(name)) is not None:
            return visible_gpus(",".join(_expanded(item) for item in text.split(",")))
    return visible_gpus(env.get(LISTS[-1]))


def _expanded(item: str) -> str:
    match = re.fullmatch(r"\s*(\d{1,4})-(\d{1,4})\s*", item, re.ASCII)
    return ",".join(map(str, range(int(match[1]), int(match[2]) + 1))) if match else item
