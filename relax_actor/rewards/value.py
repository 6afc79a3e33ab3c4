"""What counts as a reward. Checked where it enters, so that no NaN ever reaches an advantage."""

import math
import numbers

from relax_actor.errors import RelaxError

_FLOAT32_MAX = 3.4028234663852886e38


class RewardValueError(RelaxError):
    """A reward function returned something that is no reward.

    Args:
        fact: what it returned.
    """

    def __init__(self, fact: str) -> None:
        self.fact = fact
        super().__init__(f"returned {fact}, where a finite number is wanted")


def as_reward(value: object) -> float:
    """Convert a number of Python, NumPy or PyTorch to a float that float32 can hold.

    Args:
        value: an int, a float, any other real number, or an array or tensor of shape ().

    Raises:
        RewardValueError: None, a boolean, text, a complex number, an array of any other shape, NaN, an
            infinity or a number beyond float32.
    """
    number = _scalar(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise RewardValueError(_described(value))
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if math.isnan(reward):
        raise RewardValueError("NaN")
    if abs(reward) > _FLOAT32_MAX:
        raise RewardValueError(f"{type(value).__name__} {reward}, beyond float32")
    return reward


def _scalar(value: object) -> object:
    """Unwrap what has a shape () and an `item`: NumPy and PyTorch scalars, without importing either."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _described(value: object) -> str:
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{kind} of shape {tuple(shape)}"
    return "None" if value is None else f"{kind} {repr(value)[:80]}"
