"""What is kept of an actor that ended abnormally: its death line and its crash folder.

The folder `crash/NAME-INCARNATION/` is gathered in a thread of its own, since the head's loop must not wait
for a disk or for nvidia-smi:

    exit.json       who, how, when, and the death line
    traceback.txt   what the actor wrote of its own death, if it could
    page.json       its status page as the node agent found it, if it did
    stacks.txt      the stacks that its log holds, if it was asked for them before its end
    log.txt         the last 200 lines of its log
    memory.txt      /proc/meminfo and the memory files of the cgroup, of the head's host, just after
    nvidia-smi.txt  where there is such a program

Nothing here can fail the run: what cannot be had is left out, and said in `missing.txt`.
"""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from relax_actor import last_words
from relax_actor.files import log_tail
from relax_actor.stacks import is_dump_line
from relax_actor.supervision.events import Exit

LOG_LINES = 200
NVIDIA_SMI_S = 10.0
MAX_WAITING = 64
"""Deaths that wait to be gathered; in a storm of them further ones keep only their line and log."""

_CGROUP_FILES = ("memory.events", "memory.current", "memory.max", "memory.peak")


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """One end of one incarnation, as the head learned of it."""

    name: str
    incarnation: int
    pid: int
    exit: Exit
    log: Path
    crash: Path  # the folder, which need not exist
    doing: str = ""  # what it was in the middle of, as its own host has it
    last: str = ""  # the last line of its log, as its own host has it
    lag_s: float = 0.0  # how long its files may take to come here

    @property
    def traceback(self) -> Path:
        """Where the actor itself wrote why it died."""
        return self.crash.with_name(f"{self.crash.name}.txt")

    @property
    def page(self) -> Path:
        """Where the node agent put the actor's status page."""
        return self.crash.with_name(f"{self.crash.name}.json")

    @property
    def line(self) -> str:
        """The one line that a person reads first."""
        doing = self.doing or last_words.doing(self.page)
        last = self.last or last_words.last_line(self.log)
        parts = [
            f"{self.name} (incarnation {self.incarnation}, pid {self.pid}) died: {self.exit}",
            *([f", {doing}"] if doing else []),
            *([f'; last log: "{last}"'] if last else []),
            f"; log: {self.log}",
        ]
        return "".join(parts)


class CrashGatherer:
    """Gathers crash folders, one at a time, in a thread that is started by the first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "crash-gatherer")
        self._waiting = 0
        self._closing = threading.Event()

    def gather(self, death: Death, line: str) -> None:
        """Begin to gather the crash folder of an abnormal end; returns at once."""
        if death.exit.is_normal or self._waiting >= MAX_WAITING:
            return
        self._waiting += 1
        self._thread.submit(self._gather, death, line, time.time())

    def close(self) -> None:
        """Return when everything that was begun is written; by now every file is here."""
        self._closing.set()
        self._thread.shutdown(wait=True)

    def _gather(self, death: Death, line: str, at: float) -> None:
        self._closing.wait(max(0.0, at + death.lag_s - time.time()))
        try:
            gather(death, line, at)
        finally:
            self._waiting -= 1


def gather(death: Death, line: str, at: float) -> None:
    """Write a crash folder; never raises.

    Args:
        death: whose.
        line: its death line.
        at: when the head learned of it, unix seconds.
    """
    missing = []
    for name, make in _contents(death, line, at):
        try:
            text = make()
            if text:
                death.crash.mkdir(parents=True, exist_ok=True)
                (death.crash / name).write_text(text, "utf-8", "backslashreplace")
        except Exception as error:  # noqa: BLE001 - a crash folder is a help, never a reason to fail
            missing.append(f"{name}: {type(error).__name__}: {error}")
    if missing and death.crash.is_dir():
        (death.crash / "missing.txt").write_text("\n".join(missing) + "\n", "utf-8", "backslashreplace")


def _contents(death: Death, line: str, at: float) -> Iterator[tuple[str, Callable[[], str]]]:
    tail = log_tail(death.log)
    yield "exit.json", lambda: _exit_json(death, line, at)
    yield "traceback.txt", lambda: _copy_of(death.traceback)
    yield "page.json", lambda: _copy_of(death.page)
    yield "stacks.txt", lambda: _text(each for each in tail if is_dump_line(each))
    yield "log.txt", lambda: _text(iter(tail[-LOG_LINES:]))
    yield "memory.txt", _memory
    yield "nvidia-smi.txt", _nvidia_smi


def _exit_json(death: Death, line: str, at: float) -> str:
    exit_ = death.exit
    facts: dict[str, Any] = {
        "name": death.name,
        "incarnation": death.incarnation,
        "pid": death.pid,
        "t": round(at, 6),
        "exit": exit_.kind.value,
        "code": exit_.code,
        "signal": exit_.signal,
        "reason": str(exit_),
        "line": line,
        "log": str(death.log),
    }
    return json.dumps(facts, indent=2) + "\n"


def _copy_of(path: Path) -> str:
    return path.read_text("utf-8", "backslashreplace") if path.exists() else ""


def _text(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _memory() -> str:
    folder = _cgroup()
    files = [Path("/proc/meminfo"), *(folder / name for name in _CGROUP_FILES)]
    return "\n".join(f"== {file}\n{file.read_text()}" for file in files if file.exists())


def _cgroup() -> Path:
    """Return this process' cgroup v2 folder, which need not be mounted."""
    for entry in Path("/proc/self/cgroup").read_text().splitlines():
        if entry.startswith("0::"):
            return Path("/sys/fs/cgroup") / entry[3:].lstrip("/")
    return Path("/sys/fs/cgroup")


def _nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run([program], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    return done.stdout + done.stderr
