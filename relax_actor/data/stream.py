"""Which row comes when: a pure function of (seed, position), so that resuming needs one integer.

A run's prompts are numbered from 0 and never end. Position n lies in epoch n // rows; each epoch is a
permutation of all rows, so every row is used exactly once an epoch, across any number of crashes.

The permutation sorts the row numbers by 64-bit words of Philox4x64-10, keyed by (seed, epoch). NumPy
guarantees the words of a bit generator for ever, but not what `Generator.permutation` makes of them
(NEP 19): hence the sort. The order does not change between machines or versions.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_actor.ids import GroupId

_WORD = 2**64


class Position(NamedTuple):
    """Where a prompt of the stream comes from."""

    epoch: int  # from 0
    row: int  # index into the dataset's rows


class PromptStream:
    """The endless order of a run's training prompts.

    Args:
        rows: rows of the dataset, at least 1.
        seed: of the run; any integer, taken modulo 2**64.
        shuffle: permute each epoch; otherwise every epoch is in file order.

    Raises:
        ValueError: no rows.
    """

    def __init__(self, rows: int, *, seed: int, shuffle: bool = True) -> None:
        if rows < 1:
            raise ValueError(f"a prompt stream needs at least one row, got {rows}")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle

    def at(self, n: int) -> Position:
        """Return epoch and row of position `n`; costs a sort of the rows once an epoch.

        Raises:
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"positions of the prompt stream start at 0, got {n}")
        epoch, offset = divmod(n, self.rows)
        if not self.shuffle:
            return Position(epoch, offset)
        return Position(epoch, int(_permutation(self.rows, self.seed % _WORD, epoch)[offset]))


def eval_group_id(eval_round: int, prompt: int, prompts: int) -> GroupId:
    """Number an evaluation prompt: -1, -2, ... in the order of rounds and, within them, of the file.

    Args:
        eval_round: which evaluation of the run, from 0.
        prompt: index of the prompt in the evaluation set.
        prompts: size of the evaluation set.

    Raises:
        ValueError: a negative round, or no such prompt.
    """
    if eval_round < 0 or not 0 <= prompt < prompts:
        raise ValueError(f"no evaluation prompt {prompt} of {prompts} in round {eval_round}")
    return GroupId(-1 - eval_round * prompts - prompt)


def eval_position(group_id: GroupId, prompts: int) -> tuple[int, int]:
    """Return (round, prompt) of an evaluation group; the inverse of `eval_group_id`.

    Raises:
        ValueError: a training group, or an empty evaluation set.
    """
    if group_id >= 0 or prompts < 1:
        raise ValueError(f"group {group_id} is no evaluation prompt of {prompts}")
    return divmod(-1 - group_id, prompts)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    key = np.array([seed, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(rows)
    return np.argsort(words, kind="stable").astype(np.int64)
