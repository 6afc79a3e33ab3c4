r"""Rewards for answers that a rule can check. Here `exact` and `math`, the two names of the registry.

Neither sets a time limit: signals belong to the process, and the pool kills it when the time is over.
"""

import functools
import logging
from typing import Any

_BOX = r"\boxed{"
_MARK = "####"
_TAIL_CHARACTERS = 2000  # an answer without a box is at the end, and regexes over a long response are slow


def exact_reward(*, response: str, label: str) -> float:
    """Return 1.0 if response and label are the same text but for white space around them, else 0.0."""
    return float(response.strip() == label.strip())


def math_reward(*, response: str, label: str) -> float:
    r"""Return 1.0 if the response's final answer equals the label as mathematics, else 0.0.

    The final answer is the content of the last `\boxed{}`; without one what follows the last `####`;
    else what math-verify finds at the end of the response, such as the last number. Only one answer
    counts, so that naming many does not pay. Labels may have a box or GSM8K's `#### 72` as well.

    Source:
        math-verify 0.9, https://github.com/huggingface/Math-Verify
    """
    answer, gold = _marked_answer(response), _marked_answer(label)
    if (response.strip() if answer is None else answer) == (label.strip() if gold is None else gold) != "":
        return 1.0
    wanted = _parsed(_BOX + (label if gold is None else gold) + "}") or _parsed(label)
    found = _parsed(response[-_TAIL_CHARACTERS:] if answer is None else _BOX + answer + "}")
    return float(_math_verify().verify(wanted, found, timeout_seconds=None))


def _marked_answer(text: str) -> str | None:
    """Return the answer that is marked as the final one, if any is."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, mark, tail = text.rpartition(_MARK)
    return tail[-_TAIL_CHARACTERS:].strip() if mark else None


def _last_boxed(text: str) -> str | None:
    """Return the content of the last box whose braces balance; a box cut off at the end is none."""
    start = text.rfind(_BOX)
    while start >= 0:
        content = _balanced(text[start + len(_BOX) :][:_TAIL_CHARACTERS])
        if content is not None:
            return content
        start = text.rfind(_BOX, 0, start)
    return None


def _balanced(text: str) -> str | None:
    """Return what is before the brace that closes more than `text` opens."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return None


def _parsed(text: str) -> list[Any]:
    parsed: list[Any] = _math_verify().parse(text, parsing_timeout=None)
    return parsed


@functools.cache
def _math_verify() -> Any:
    """Import math-verify, which takes a second because of sympy."""
    import math_verify  # noqa: PLC0415 - exact rewards do without

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns once that we set no time limit
    return math_verify
