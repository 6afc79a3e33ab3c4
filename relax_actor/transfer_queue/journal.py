"""The journal: the ledger's events in a file, so that the queue itself can be killed.

    file   = magic, record*
    record = u32 payload bytes, u32 check of them and of the record's offset, u64 xxh3 of the payload, payload

All little-endian; a payload is the MessagePack of the events of one or more whole decisions. So a decision is
in the file whole or not at all: a group whose last reward is there is also dropped or complete.

A writer that dies leaves at most a record cut short at the end, which nobody was told of: it is cut off when
the journal is opened next. After a power cut the end may also be zeros, or a whole record of wrong bytes.
Anything wrong before the last record is damage and is refused with its offset, never skipped; the length
has a check of its own, or a flipped bit in it would make all that follows look like such an end.

Refused: a line-based log (a torn line can look whole), sqlite (a thousand times the code for one append).
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import xxhash

from relax_actor.errors import RelaxError
from relax_actor.transfer_queue.events import decode_events, encode_events
from transport.closing import Closing

E = TypeVar("E")

_MAGIC = b"rxjrnl\x00\x01"
_HEADER = struct.Struct("<IIQ")
_CHECKED = struct.Struct("<QI")  # what the header's own check covers: offset and length
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JournalError(RelaxError):
    """Base of what can go wrong with a journal."""


class JournalCorruptError(JournalError):
    """A record that is not the last one is damaged; the file was not changed."""

    def __init__(self, path: Path, offset: int, fact: str) -> None:
        self.path, self.offset, self.fact = path, offset, fact
        super().__init__(f"journal {path} is damaged at byte {offset}: {fact}")


class JournalSpaceError(JournalError):
    """There is no room for a record; the file is as before, and `commit` may be tried again."""

    def __init__(self, path: Path, need_bytes: int) -> None:
        self.path, self.need_bytes = path, need_bytes
        super().__init__(f"journal {path} needs {need_bytes} bytes and the file system has no room")


class JournalBusyError(JournalError):
    """Another process writes this journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"journal {path} is being written by another process")


def read(path: Path, decode: Callable[[bytes], Iterable[Any]] = decode_events) -> Iterator[Any]:
    """Yield the events of a journal; a torn end is left out. A missing file has none.

    Args:
        path: the file.
        decode: the inverse of the journal's `encode`.

    Raises:
        JournalCorruptError: a record before the last one is damaged.
    """
    data = path.read_bytes() if path.exists() else b""
    for record in _records(path, data):
        try:
            yield from decode(record.payload)
        except msgspec.MsgspecError as error:
            raise JournalCorruptError(path, record.offset, f"these are no events: {error}") from error


class Journal(Closing, Generic[E]):
    """A journal opened for appending, by one process at a time.

    Args:
        path: the file; made if it is missing, its torn end cut off if it has one.
        encode: what makes bytes of events.
        fsync: wait for the disk at every commit. Without, a commit survives the death of every process
            but not of the host.

    Raises:
        JournalCorruptError: see `read`.
        JournalBusyError: another process has it open.
        JournalSpaceError: not even its first bytes fit.
    """

    def __init__(
        self,
        path: Path,
        *,
        encode: Callable[[Sequence[E]], bytes] = encode_events,  # type: ignore[assignment]  # the ledger's
        fsync: bool = False,
    ) -> None:
        self.path = path
        self._encode, self._fsync = encode, fsync
        self._pending: list[E] = []
        self._fd = _open_locked(path)
        try:
            self._end = self._whole_bytes()
            os.ftruncate(self._fd, self._end)
            if self._end == 0:
                self._write(_MAGIC)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """How long the file is."""
        return self._end

    @property
    def is_pending(self) -> bool:
        """Whether something was appended since the last commit."""
        return bool(self._pending)

    def append(self, events: Sequence[E]) -> None:
        """Take the events of a decision; they are written by the next `commit`."""
        self._pending.extend(events)

    def commit(self) -> None:
        """Write everything appended since the last commit, as one record, whole or not at all.

        Raises:
            JournalSpaceError: no room; the file is as before, and the events are kept for another try.
        """
        if self._pending:
            self._write(_record(self._end, self._encode(self._pending)))
            self._pending.clear()

    def rewrite(self, events: Iterable[E]) -> None:
        """Replace the whole journal by these events, or leave it as it is.

        Raises:
            JournalSpaceError: no room; the old journal stays, and stays open.
        """
        fresh_path = self.path.with_name(self.path.name + ".new")
        data = _MAGIC + _record(len(_MAGIC), self._encode([*events]))
        fd = _written(fresh_path, data)
        fresh_path.replace(self.path)
        self.close()
        self._fd, self._end = fd, len(data)
        self._pending.clear()
        _sync_folder(self.path.parent)

    def close(self) -> None:
        """Let go of the file; what was not committed is lost. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _whole_bytes(self) -> int:
        data = self.path.read_bytes()
        end = min(len(data), len(_MAGIC)) if data.startswith(_MAGIC) else 0
        for record in _records(self.path, data):
            end = record.end
        return end

    def _write(self, data: bytes) -> None:
        try:
            _write_at(self._fd, data, self._end)
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise _explained(self.path, len(data), error) from error
        self._end += len(data)


class _Record(NamedTuple):
    offset: int
    payload: bytes
    end: int


def _record(offset: int, payload: bytes) -> bytes:
    check = _header_check(offset, len(payload))
    return _HEADER.pack(len(payload), check, xxhash.xxh3_64_intdigest(payload)) + payload


def _records(path: Path, data: bytes) -> Iterator[_Record]:
    """Yield the whole records; stop at a torn end."""
    if not data.startswith(_MAGIC):
        if _MAGIC.startswith(data) or not any(data):
            return
        raise JournalCorruptError(path, 0, "this is not the beginning of a journal")
    offset = len(_MAGIC)
    while (record := _record_at(path, data, offset)) is not None:
        yield record
        offset = record.end


def _record_at(path: Path, data: bytes, offset: int) -> _Record | None:
    start = offset + _HEADER.size
    if start > len(data):
        return None
    if not any(data[offset:start]):
        _check_all_zeros(path, data, offset)
        return None
    length, check, digest = _HEADER.unpack_from(data, offset)
    if check != _header_check(offset, length):
        raise JournalCorruptError(path, offset, "the length of the record is not what was written")
    payload = data[start : start + length]
    if len(payload) < length:
        return None
    if xxhash.xxh3_64_intdigest(payload) == digest:
        return _Record(offset, payload, start + length)
    if start + length == len(data):
        return None
    raise JournalCorruptError(path, offset, "the bytes of the record are not what was written")


def _check_all_zeros(path: Path, data: bytes, offset: int) -> None:
    if any(data[offset:]):
        raise JournalCorruptError(path, offset, "zeros, and a record behind them")


def _header_check(offset: int, length: int) -> int:
    return xxhash.xxh32_intdigest(_CHECKED.pack(offset, length))


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise JournalBusyError(path) from error
    return fd


def _written(path: Path, data: bytes) -> int:
    """Return the descriptor of a new, locked file that is on the disk."""
    path.unlink(missing_ok=True)
    fd = _open_locked(path)
    try:
        _write_at(fd, data, 0)
        os.fsync(fd)
    except OSError as error:
        os.close(fd)
        path.unlink()
        raise _explained(path, len(data), error) from error
    return fd


def _write_at(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        at, rest = at + written, rest[written:]


def _explained(path: Path, need_bytes: int, error: OSError) -> Exception:
    return JournalSpaceError(path, need_bytes) if error.errno in _NO_SPACE else error


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
