"""How old a sample is: the trainer's policy version minus that of the sample's oldest token."""

from collections import Counter
from collections.abc import Iterable


def staleness(trainer_version: int, oldest_version: int) -> int:
    """Return how many policy versions a sample lags behind the trainer.

    Args:
        trainer_version: the version the trainer holds at the moment of training.
        oldest_version: the version that sampled the sample's oldest token.

    Returns:
        Policy versions, at least 0; time spent in a queue is included because the trainer's
        version is that of the moment of training.

    Raises:
        ValueError: the sample is newer than the trainer, so somebody's versions went back.
    """
    if oldest_version > trainer_version:
        raise ValueError(
            f"a token was sampled by policy version {oldest_version}, after the trainer's {trainer_version}"
        )
    return trainer_version - oldest_version


def histogram(trainer_version: int, oldest_versions: Iterable[int]) -> dict[int, int]:
    """Count samples by staleness.

    Returns:
        Samples by versions behind, smallest first; only what occurred.

    Raises:
        ValueError: as `staleness` does.
    """
    counts = Counter(staleness(trainer_version, oldest) for oldest in oldest_versions)
    return dict(sorted(counts.items()))
