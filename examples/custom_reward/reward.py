"""A reward function of your own: named `reward:close_to_length` in custom.toml."""

from typing import Any


def close_to_length(*, response: str, extra: dict[str, Any]) -> float:
    """Return 1.0 for a response of as many words as the row's column `words` asks for, less for others.

    A reward function takes what it wants of response, label, extra, origin, finish_reason, group_id and
    sample_index, by keyword, and returns a finite number.
    """
    words, wanted = len(response.split()), extra["words"]
    return min(words, wanted) / max(words, wanted)
