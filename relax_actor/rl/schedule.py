"""The learning rate as a function of progress."""


def learning_rate_frac(update: int, *, warmup: int, total: int, linear: bool, min_frac: float) -> float:
    """Return the share of the peak learning rate to use for one optimizer update.

    Args:
        update: which one, from 0.
        warmup: updates over which the share rises in equal steps to 1; 0 starts at 1.
        total: updates of the whole run.
        linear: fall in equal steps from 1 at the end of the warm-up to `min_frac` at the last
            update; otherwise stay at 1.
        min_frac: where `linear` ends, and stays should the run go on.

    Returns:
        A share above 0 and at most 1 (0 only where `min_frac` is 0).
    """
    if update < warmup:
        return (update + 1) / warmup
    if not linear:
        return 1.0
    span = max(1, total - 1 - warmup)
    done_frac = min(1.0, (update - warmup) / span)
    return 1.0 - (1.0 - min_frac) * done_frac
