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
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        match = _LAST_NUMBER.fullmatch(name)
        stem = (match[1], match[3]) if match else (name, "")
        groups.setdefault(stem, []).append(match[2] if match else "")
    return ",".join(text for stem, digits in groups.items() for text in _folded(*stem, digits))


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


def _folded(prefix: str, suffix: str, digits: list[str]) -> Iterator[str]:
    """Yield a pattern for the numbers of each width, the names without a number first."""
    if "" in digits:
        yield prefix
    padded = {len(text) for text in digits if text[:1] == "0"}
    by_width: dict[int, list[int]] = {}
    for text in filter(None, digits):
        width = max((width for width in padded if width <= len(text)), default=1)
        by_width.setdefault(width, []).append(int(text))
    for width, numbers in by_width.items():
        listed = ",".join(_ranges(sorted(numbers), width))
        yield f"{prefix}{listed if len(numbers) == 1 else f'[{listed}]'}{suffix}"


def _ranges(numbers: list[int], width: int) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = f"{members[0]:0{width}}", f"{members[-1]:0{width}}"
        yield first if first == last else f"{first}-{last}"
