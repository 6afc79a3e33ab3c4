"""What the kernel says of a process of this host: whether it is still that one, and what it uses."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

_TICKS_A_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = frozenset("ZX")


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one process."""

    pid: int
    start_ticks: int
    state: str  # R, S, D, T … as in proc(5)
    cpu_s: float  # all its threads, since it started
    age_s: float
    rss_bytes: int

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it: it lives, but does nothing."""
        return self.state in {"T", "t"}

    @property
    def cpu_frac(self) -> float:
        """CPU over its whole life; 1.0 is one core."""
        return self.cpu_s / self.age_s if self.age_s > 0 else 0.0


def look(pid: int, start_ticks: int | None) -> ProcessFacts | None:
    """Return what a process is doing, or None where it is gone or its pid belongs to another by now.

    Args:
        pid: on this host.
        start_ticks: when it was started, since boot; None looks at nothing, since it could be anybody.
    """
    if pid <= 0 or start_ticks is None:
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in _GONE or int(fields[19]) != start_ticks:
        return None
    return ProcessFacts(
        pid=pid,
        start_ticks=start_ticks,
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_A_S,
        age_s=time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / _TICKS_A_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where it cannot be seen."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


class Handling:
    """Whether a process is done with a signal that is sent to it once this is made.

    A signal is pending until a thread takes it, and that thread blocks it for as long as its handler runs.
    Between the two there is a moment at which neither is to be seen: who asks has seen that it has begun.

    Args:
        pid: on this host.
        number: of the signal.
    """

    def __init__(self, pid: int, number: int) -> None:
        self._pid, self._bit = pid, 1 << (number - 1)
        self._takers = {thread for thread, seen in self._threads() if not self._has(seen, "SigBlk")}

    @property
    def is_over(self) -> bool:
        """Whether no thread has it to take any more, or is in its handler; also of a process that is gone."""
        return not any(
            self._has(seen, "ShdPnd")
            or self._has(seen, "SigPnd")
            or (thread in self._takers and self._has(seen, "SigBlk"))
            for thread, seen in self._threads()
        )

    def _has(self, seen: dict[str, str], mask: str) -> bool:
        return bool(int(seen.get(mask, "0"), 16) & self._bit)

    def _threads(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each thread that has not ended, and its lines of `status` in proc(5)."""
        with suppress(OSError):
            for folder in Path(f"/proc/{self._pid}/task").iterdir():
                with suppress(OSError):  # it has ended
                    lines = (folder / "status").read_text("utf-8", "replace").splitlines()
                    seen = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                    if seen["State"][0] not in _GONE:
                        yield folder.name, seen
