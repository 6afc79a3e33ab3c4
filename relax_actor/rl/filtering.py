"""Which groups teach nothing: all their samples are equally good, so every advantage is 0."""

from collections.abc import Sequence

EPSILON = 1e-6
"""Rewards that differ by less are equal."""


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether no two rewards of a group differ by `EPSILON` or more, nor so their deviation.

    Args:
        rewards: of the group's scored samples, finite; none or one have no variance either.

    Source:
        Dynamic sampling of DAPO: arXiv:2503.14476.
    """
    return not rewards or max(rewards) - min(rewards) < EPSILON
