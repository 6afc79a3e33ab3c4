"""Carry out a reshard plan on bytes in this process's memory, with numpy; the plan itself needs none."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from relax_actor.dcs.reshard import Copy, ReplicaShard

Bytes = npt.NDArray[np.uint8]


def assemble(shard: ReplicaShard, source: Callable[[int, str], Bytes], target: Bytes) -> None:
    """Fill in what a replica rank gets of one tensor.

    Args:
        shard: out of a plan.
        source: given a trainer rank and a parameter, that rank's shard as published, uint8 [bytes],
            contiguous.
        target: writable uint8 [shard.nbytes], contiguous; every byte is written once.

    Raises:
        ValueError: a source or the target is shorter than the plan says.
    """
    for copy in shard.copies:
        carry_out(copy, source(copy.source, copy.parameter), target)


def carry_out(copy: Copy, source: Bytes, target: Bytes) -> None:
    """Make one copy of a plan.

    Args:
        copy: out of a plan.
        source: the shard it is from, uint8 [bytes], contiguous.
        target: all of what the replica rank gets of the tensor, uint8 [bytes], contiguous.

    Raises:
        ValueError: one of them is shorter than the plan says.
    """
    given = _rows(source, copy.source_offset, copy.source_pitch, copy)
    np.copyto(_rows(target, copy.target_offset, copy.target_pitch, copy), given)


def _rows(raw: Bytes, offset: int, pitch: int, copy: Copy) -> Bytes:
    """View the runs of a copy as uint8 [rows, row_bytes]; `np.ndarray` checks that they lie within."""
    return np.ndarray((copy.rows, copy.row_bytes), np.uint8, raw, offset, (pitch, 1))
