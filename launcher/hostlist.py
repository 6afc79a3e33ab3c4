"""Names of many hosts in few words: `node[03-06,09]` in hostfiles, `n[1-2],gpu5` of Slurm. Pure.

Zero padding is kept, as Slurm does it: the width of a range's first number is the least width of all.
"""

import itertools
import re
from collections.abc import Iterable, Iterator

from relax_actor.errors import RelaxError

MAX_HOSTS = 65_536
"""More than that in one pattern is a typing mistake, and would fill the memory."""

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)


class HostlistError(RelaxError):
    """A pattern that stands for no hosts.

    Args:
        offset: where in the text the mistake is, from 0.
        fact: what is wrong.
        hint: what to do about it.
    """

    def __init__(self, offset: int, fact: str, hint: str = "") -> None:
        self.offset, self.fact, self.hint = offset, fact, hint
        super().__init__(fact + (f"\n\nhint: {hint}" if hint else ""))


def expand(pattern: str) -> list[str]:
    """Return the names that one pattern stands for, in its order.

    Args:
        pattern: text with any number of `[…]`, each a list of numbers and ranges.

    Raises:
        HostlistError: a bracket without its partner, an empty or backward range, or too many names.
    """
    parts = list(_parts(pattern))
    total = 1
    for part in parts:
        total *= len(part)
    if total > MAX_HOSTS:
        raise HostlistError(0, f"stands for {total} hosts, more than {MAX_HOSTS}")
    return ["".join(words) for words in itertools.product(*parts)]


def expand_all(text: str) -> list[str]:
    """Return the names of a list of patterns separated by commas, such as `SLURM_JOB_NODELIST`.

    Raises:
        HostlistError: as `expand`; the offset counts from the start of the whole text.
    """
    names: list[str] = []
    for offset, pattern in split(text):
        try:
            names += expand(pattern)
        except HostlistError as error:
            raise HostlistError(offset + error.offset, error.fact, error.hint) from None
    return names


def split(text: str) -> list[tuple[int, str]]:
    """Cut a list at the commas that are in no brackets; each piece with its offset, empty ones left out."""
    pieces, start, depth = [], 0, 0
    for at, char in enumerate(f"{text},"):
        depth += (char == "[") - (char == "]")
        if char == "," and (depth <= 0 or at == len(text)):
            pieces.append((start, text[start:at]))
            start = at + 1
    return [(offset, piece) for offset, piece in pieces if piece]


def fold(names: Iterable[str]) -> str:
    """Return names as `expand_all` reads them, in few words: names that differ in their last number together.

    Args:
        names: the order of their first appearance is kept; ranges are sorted.
    """
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        if not (match := _LAST_NUMBER.fullmatch(name)):
            groups[name, "", 0] = []
            continue
        prefix, digits, suffix = match.groups()
        groups.setdefault((prefix, suffix, _width(digits)), []).append(int(digits))
    return ",".join(_folded(*key, sorted(numbers)) for key, numbers in groups.items())


def _parts(pattern: str) -> Iterator[list[str]]:
    """Yield, for each piece of a pattern, the texts that may stand there."""
    at = 0
    while at < len(pattern):
        opening = pattern.find("[", at)
        closing = pattern.find("]", at)
        if 0 <= closing < opening or (opening < 0 <= closing):
            raise HostlistError(closing, "has `]` without `[`")
        if opening < 0:
            yield [pattern[at:]]
            return
        if closing < 0:
            raise HostlistError(opening, "has `[` without `]`", "ranges have no spaces: node[03-06,09]")
        yield [pattern[at:opening]]
        yield _numbers(pattern[opening + 1 : closing], opening + 1)
        at = closing + 1


def _numbers(text: str, offset: int) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if not match:
            fact = f"has `{item}` where a number or a range stands" if item else "has an empty range"
            raise HostlistError(offset, fact, "for example node[03-06,09]")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HostlistError(
                offset, f"has the range {item}, which runs backwards", f"write {last}-{first}"
            )
        if last - first >= MAX_HOSTS:
            raise HostlistError(offset, f"has {last - first + 1} hosts in one range, more than {MAX_HOSTS}")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
        offset += len(item) + 1
    return numbers


def _width(digits: str) -> int:
    """Return the width that zeros keep; 1 where there are none in front, so that 9 and 10 go together."""
    return len(digits) if digits[0] == "0" else 1


def _folded(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return prefix
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}}{suffix}"
    return f"{prefix}[{','.join(_ranges(numbers, width))}]{suffix}"


def _ranges(numbers: list[int], width: int) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = f"{members[0]:0{width}}", f"{members[-1]:0{width}}"
        yield first if first == last else f"{first}-{last}"
