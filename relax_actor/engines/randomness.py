"""Random numbers that are a function of what they are for, not of who draws them, when, or beside what.

SplitMix64's finalizer is a bijection of 64 bits that passes the usual batteries. Chaining it over seed,
group, sample and position gives every token a number of its own, on any replica, in any batch.
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def token_uniforms(
    seed: int,
    group_ids: npt.ArrayLike,
    sample_indices: npt.ArrayLike,
    positions: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Return one uniform number a token, fixed by seed, group, sample and position.

    Args:
        seed: any integer; taken modulo 2**64.
        group_ids: int64 [n] or one; may be negative.
        sample_indices: int64 [n] or one.
        positions: int64 [n] or one, counted from the first response token.

    Returns:
        float64 [n] in [0, 1), multiples of 2**-53.

    Source:
        Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (the finalizer).
    """
    state = _chained(seed, group_ids, sample_indices, positions)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_seed(seed: int, group_id: int, sample_index: int) -> int:
    """Return a sample's seed for an engine that draws by itself, from 0 to below 2**31.

    Such an engine has to make every token's number of the seed and its position, as SGLang does.
    """
    return int(_chained(seed, group_id, sample_index)[0] >> np.uint64(33))


def _chained(seed: int, *parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    state = _mixed(np.array([seed & _MASK], dtype=np.uint64))
    for part in parts:
        # The sum is not symmetric in the parts, because each earlier one has been mixed.
        state = _mixed(state + np.atleast_1d(np.asarray(part, dtype=np.int64)).view(np.uint64))
    return state


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble each word; wraps modulo 2**64 on purpose."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
