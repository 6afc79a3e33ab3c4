"""The words of a command line, read one by one: what each means as a value, and what is wrong with them."""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import RefusedError
from launcher.fields import nearest
from relax_actor.errors import ConfigError

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

Words = Mapping[str, Any]
"""Option -> its text, a tuple of texts where it may be repeated, or a bool; None, () or False: not given."""


class WordReader:
    """The words, typed, and what is wrong with them."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.problems: list[ConfigError] = []

    def text(self, option: str) -> str:
        """Return an option's text, empty where it is not given."""
        return self._words.get(option) or ""

    def texts(self, option: str) -> tuple[str, ...]:
        """Return the texts of an option that may be repeated."""
        return tuple(self._words.get(option) or ())

    def here(self, option: str) -> str:
        """Return a path of this host, absolute; empty where it is not given."""
        text = self.text(option)
        return str(Path(text).expanduser().absolute()) if text else ""

    def flag(self, option: str) -> bool:
        """Return whether a switch is on."""
        return bool(self._words.get(option))

    def is_given(self, option: str) -> bool:
        """Return whether an option is there, be it empty."""
        return self._words.get(option) not in (None, (), False)

    def number(self, option: str, default: int = 0, *, most: int = 1_000_000, auto: bool = False) -> int:
        """Return a number of at least 1; the default where it is not given, or `auto`."""
        text = self._words.get(option)
        if text is None or (auto and text == "auto"):
            return default
        if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
            self.complain(option, f"must be a whole number from 1 to {most}, got `{text}`")
            return default
        return int(text)

    def member(self, option: str, kind: type[E], default: E) -> E:
        """Return a member of a closed set."""
        text = self._words.get(option)
        if text is None:
            return default
        try:
            return kind(text)
        except ValueError:
            members = [member.value for member in kind]
            close = nearest(text, members)
            fact = f"must be one of {', '.join(f'`{member}`' for member in members)}, got `{text}`"
            self.complain(option, fact, f"did you mean `{close}`?" if close else "")
            return default

    def checked(self, read: Callable[[], T], default: T) -> T:
        """Return what a function reads, or the default, and keep what it refuses."""
        try:
            return read()
        except RefusedError as error:
            self.problems += error.problems
        except ConfigError as error:
            self.problems.append(error)
        return default

    def complain(self, option: str, fact: str, hint: str = "") -> None:
        """Add a problem."""
        self.problems.append(ConfigError(option, fact, hint))
