"""Reads Python stacks that `faulthandler` dumped into an actor's log: pure functions of its lines.

An actor dumps the stacks of all its threads on SIGUSR1, from a C signal handler that needs neither the GIL
nor the main thread, so a busy or deadlocked actor can be looked into.
"""

import re
from collections.abc import Iterable

import msgspec

_THREAD = re.compile(
    r"(?P<current>Current t|T)hread (?P<ident>0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?)(?: in (?P<function>.*))?')
_OTHER = re.compile(r"  (?:\.\.\.|<.*>)|Extension modules: .*|Fatal Python error: .*")


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a stack."""

    file: str
    line: int  # 0 where Python did not know it
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """One thread, the innermost frame first."""

    ident: str  # as in the dump, hexadecimal
    is_current: bool  # it held the GIL, or took the signal
    frames: tuple[Frame, ...]


def is_dump_line(line: str) -> bool:
    """Whether a line of a log belongs to a dump and not to what the actor itself said."""
    return any(pattern.fullmatch(line) for pattern in (_THREAD, _FRAME, _OTHER))


def parse_dump(lines: Iterable[str]) -> list[ThreadStack]:
    """Return the threads of all dumps among the lines, in their order; other lines are skipped."""
    stacks: list[tuple[str, bool, list[Frame]]] = []
    for line in lines:
        if thread := _THREAD.fullmatch(line):
            stacks.append((thread["ident"], thread["current"] == "Current t", []))
        elif (frame := _FRAME.fullmatch(line)) and stacks:
            stacks[-1][2].append(_frame(frame))
    return [
        ThreadStack(ident=ident, is_current=is_current, frames=tuple(frames))
        for ident, is_current, frames in stacks
    ]


def _frame(found: re.Match[str]) -> Frame:
    line = int(found["line"]) if found["line"].isdecimal() else 0
    return Frame(file=found["file"], line=line, function=found["function"] or "?")
