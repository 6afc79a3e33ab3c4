"""The reward of `spell.toml`: reasoning-gym's own scorer, of which only a full score counts."""

import functools
from typing import Any


def spelled(*, response: str, label: str) -> float:
    """Return 1.0 if reasoning-gym gives the answer the full score, else 0.0.

    Its partial scores are higher for almost right answers, and training on them ends lower.
    """
    return float(_scorer().score_answer(response.strip(), {"answer": label}) == 1.0)


@functools.cache
def _scorer() -> Any:
    import reasoning_gym  # noqa: PLC0415 - once a process, and it takes seconds

    return reasoning_gym.create_dataset("spell_backward", seed=0, size=1)


_scorer()  # when the worker starts, so that the first sample does not pay for it
