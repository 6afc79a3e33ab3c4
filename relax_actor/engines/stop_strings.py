"""Where the text of a response first has a stop string, which may begin and end in the middle of tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

SLACK_TOKENS = 4
"""Tokens before those that a string is made of: some tokenizers drop what their first token begins with."""


class StopStrings:
    """Looks for strings in the text of token ids.

    Args:
        strings: none of them empty.
        text_of: the text of token ids, special tokens included.
    """

    def __init__(self, strings: Sequence[str], text_of: Callable[[Sequence[int]], str]) -> None:
        self.strings, self._text_of = tuple(strings), text_of
        # A token has one byte at least, but for those without any text, of which there are few.
        self._window = SLACK_TOKENS + max(len(string.encode()) for string in strings)

    def end(self, tokens: Sequence[int], begin: int = 0) -> int | None:
        """Return how many tokens there are up to the first one that makes a string whole.

        Args:
            tokens: of a response.
            begin: so many of them have been looked at before, and had none.

        Returns:
            `begin` + 1 at least, or None where there is no string.
        """
        first = max(0, begin - self._window)

        def has_one(count: int) -> bool:
            text = self._text_of(tokens[first:count])
            return any(string in text for string in self.strings)

        if begin >= len(tokens) or not has_one(len(tokens)):
            return None
        counts = range(begin + 1, len(tokens))
        return begin + 1 + bisect_left(counts, 1, key=has_one)
