"""The run's event log: one JSON line an event, one file a run, written by every process of it.

The file is the truth about a run; the console, metrics, pictures and `relax-actor status` only read it.

Invariants:
- An event is one `os.write` to an O_APPEND descriptor, so lines of different processes never mix.
- Writing never raises into its caller: what cannot be encoded is described, what cannot be written is
  kept, counted and written later. A run is never stopped by its own log.
- A line is ASCII: lone surrogates, NUL and right-to-left marks are escaped; NaN and infinities are strings.
- Reading tolerates a torn line: the last one is left for the next read, one in the middle is skipped.

Every event has `t` (unix seconds), `m` (CLOCK_MONOTONIC seconds), `actor`, `inc`, `pid` and `kind`; what
else it has depends on the kind: docs/reference/run-folder.md lists them.
"""

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]
"""One line of the event log."""

_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

KEPT_LINES = 10_000
"""Lines held back while the disk is full; beyond that the oldest are dropped and counted."""


class EventLog:
    """Appends events of one incarnation of one actor; safe to share between threads.

    Args:
        path: events.jsonl of the run; created if missing. `os.devnull` makes a log nobody reads.
        actor: who writes, such as `rollout/3`.
        incarnation: which start of that actor, from 1.
    """

    def __init__(self, path: Path, actor: str, incarnation: int) -> None:
        self.path, self.actor, self.incarnation = Path(path), actor, incarnation
        self.failed_writes = 0
        self.lost_events = 0
        self._fd: int | None = None
        self._torn = False
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Append one event; never raises.

        Args:
            kind: what happened, in the past tense or as a noun.
            fields: facts of any type; `pid=` says whose pid, where the event is about another process.
        """
        with suppress(Exception):
            line = _encode(self._header(kind), fields)
            with self._lock:
                self._waiting.append(line)
                self._drop_surplus()
                self._write_waiting()

    @contextmanager
    def span(self, name: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        """Emit a `span` event with `start` (unix s) and `dur_s` when the block ends, by whatever end.

        Yields:
            The event's fields, to which the block may add.
        """
        start, since = time.time(), time.monotonic()
        try:
            yield fields
        except BaseException as error:
            fields["error"] = type(error).__name__
            raise
        finally:
            self.emit("span", **{**fields, "name": name, "start": start, "dur_s": time.monotonic() - since})

    def close(self) -> None:
        """Try once more to write what waits and close the file; the next `emit` opens it again."""
        with self._lock:
            self._write_waiting()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _header(self, kind: str) -> Event:
        return {
            "t": round(time.time(), 6),
            "m": round(time.monotonic(), 6),
            "actor": self.actor,
            "inc": self.incarnation,
            "pid": os.getpid(),
            "kind": kind,
        }

    def _drop_surplus(self) -> None:
        while len(self._waiting) > KEPT_LINES:
            self._waiting.popleft()
            self.lost_events += 1

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write_line(self._opened(), self._waiting[0])
                self._waiting.popleft()
        except OSError:  # disk full, folder gone: kept for the next event
            self.failed_writes += 1

    def _opened(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._fd

    def _write_line(self, fd: int, line: bytes) -> None:
        data = b"\n" + line if self._torn else line  # end the torn line, so that this one is whole
        written = os.write(fd, data)
        self._torn = written < len(data) and (self._torn or written > 0)
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Read the whole lines from a byte offset on.

    Args:
        path: the event log; a missing one is an empty one.
        offset: in bytes, as returned by the call before; beyond the end of the file it starts anew.

    Returns:
        The events, oldest first, and the offset after the last whole line. Lines that are not a JSON
        object are skipped.
    """
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(offset if offset <= size else 0)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return [event for line in whole.split(b"\n") if (event := decode_event(line))], start + len(whole)


def decode_event(line: bytes) -> Event | None:
    """Return the event of a line, or None for a line that is not a JSON object."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def follow(
    path: Path, *, offset: int = 0, poll_s: float = 0.2, stop: Callable[[], bool] = lambda: False
) -> Iterator[Event]:
    """Yield events as they are written, until `stop()` is true and nothing is left to read.

    Args:
        path: the event log; it need not exist yet.
        offset: in bytes.
        poll_s: seconds between looks at the file.
        stop: asked after every look that found nothing.
    """
    while True:
        stopping = stop()
        events, offset = read_events(path, offset)
        yield from events
        if stopping and not events:
            return
        if not events:
            time.sleep(poll_s)


def _encode(header: Event, fields: Mapping[str, Any]) -> bytes:
    members = (f'"{name}":{_value(value)}' for name, value in (header | dict(fields)).items())
    return f"{{{','.join(members)}}}\n".encode("ascii")


def _value(value: Any) -> str:
    try:
        return _JSON.encode(_plain(value))
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is described
        return f'"<{type(value).__name__}: {type(error).__name__} while it was encoded>"'


def _plain(value: Any) -> Any:
    """Turn any value into what JSON can say, losing type rather than raising."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "backslashreplace")
    return _plain_container(value)


def _plain_container(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if hasattr(value, "tolist"):  # NumPy and torch, without importing either
        return _plain(value.tolist())
    return _described(value)


def _described(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value))
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return repr(value)
