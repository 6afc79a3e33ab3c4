"""Named shared memory: segments that say in their name who owns them.

A segment is a plain file in a tmpfs directory, mapped into memory. Its name is
`rx-<run>-<owner>.<incarnation>-<label>` (a `/` of the owner is written `~`), so a sweep after a death needs
nothing but names: no table, no server, no content.

Invariants
- Memory is reserved when a segment is made (fallocate): a full file system is an error there and then,
  never a SIGBUS at first touch.
- No name is ever taken over from another segment: making and renaming fail where the name exists.
- No part of a name may hold the separator that ends it, so a run's prefix never matches another run.
- A lease (`attach(..., lease=True)`) belongs to the mapping: it lasts while any view of it does, and it ends
  by itself when the process dies.

Refused: `multiprocessing.shared_memory`, whose resource tracker unlinks what other processes still use.

A mapping costs one file descriptor for as long as it lives.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from transport import leavings
from transport.segment import (
    Segment,
    SegmentBusyError,
    SegmentError,
    SegmentExistsError,
    SegmentLock,
    SegmentMissingError,
    SegmentName,
    SegmentNameError,
    SegmentSpaceError,
    parse_name,
)

__all__ = [
    "Segment",
    "SegmentBusyError",
    "SegmentError",
    "SegmentExistsError",
    "SegmentLock",
    "SegmentMissingError",
    "SegmentName",
    "SegmentNameError",
    "SegmentSpaceError",
    "ShmSpace",
    "other_runs",
    "parse_name",
]

_RUN = re.compile(r"[A-Za-z0-9_]+")
_OWNER = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_LABEL = re.compile(r"[A-Za-z0-9._-]+")
_MAX_NAME_BYTES = 255  # NAME_MAX of Linux
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def other_runs(root: str | Path) -> list[str]:
    """Return the ids of all runs that have segments in `root`, sorted."""
    return sorted({name.run_id for name in _segments_in(Path(root))})


class ShmSpace:
    """The segments of one run in one directory.

    Args:
        run_id: letters, digits and `_`; every name carries it.
        root: a tmpfs directory. Another file system works, at its own speed.

    Raises:
        SegmentNameError: `run_id` cannot be part of a name.
    """

    def __init__(self, run_id: str, root: str | Path = "/dev/shm") -> None:  # noqa: S108 - what this is for
        if _RUN.fullmatch(run_id) is None:
            raise SegmentNameError("run id", run_id)
        self.run_id = run_id
        self.root = Path(root)

    def name(self, owner: str, incarnation: int, label: str) -> str:
        """Return the name a segment of these parts has, whether or not it exists.

        Raises:
            SegmentNameError: a part cannot be in a name.
        """
        if _OWNER.fullmatch(owner) is None:
            raise SegmentNameError("owner", owner)
        if incarnation < 0:
            raise SegmentNameError("incarnation", incarnation)
        if _LABEL.fullmatch(label) is None:
            raise SegmentNameError("label", label)
        return self._checked(SegmentName(self.run_id, owner, incarnation, label))

    def create(self, owner: str, incarnation: int, label: str, nbytes: int) -> Segment:
        """Make and map a writable segment of zeros, its memory reserved and touched.

        Raises:
            SegmentSpaceError: the file system is full.
            SegmentExistsError: the owner has one with this label.
            SegmentNameError: a part cannot be in a name.
            ValueError: `nbytes` is below 1.
        """
        if nbytes < 1:
            raise ValueError(f"a segment has at least one byte, not {nbytes}")
        name = self.name(owner, incarnation, label)
        with self._opened_new(name, nbytes) as fd:
            return _mapped(name, fd, nbytes, writable=True, populate=True)

    def attach(self, name: str, *, writable: bool = False, lease: bool = False) -> Segment:
        """Map an existing segment.

        Args:
            name: as `Segment.name`; of this run.
            writable: map for writing as well.
            lease: refuse `try_lock` to everybody for as long as the mapping, or any view of it, lives.

        Raises:
            SegmentMissingError: there is none, or it is still being made.
            SegmentBusyError: a lease was asked for and somebody holds the lock.
            SegmentNameError: not a name of this run.
        """
        with self._opened(name, writable=writable) as fd:
            if lease and not _flock(fd, fcntl.LOCK_SH):
                raise SegmentBusyError(name)
            nbytes = os.fstat(fd).st_size
            if nbytes == 0:
                raise SegmentMissingError(name)
            # The mapping keeps a duplicate of the descriptor, and with it the lock.
            return _mapped(name, fd, nbytes, writable=writable)

    def try_lock(self, name: str) -> SegmentLock | None:
        """Take a segment for oneself, or return None at once where a lease or a lock holds it.

        Raises:
            SegmentMissingError: there is none.
            SegmentNameError: not a name of this run.
        """
        with self._opened(name, writable=True) as fd:
            return SegmentLock(os.dup(fd)) if _flock(fd, fcntl.LOCK_EX) else None

    def adopt(self, name: str, owner: str, incarnation: int) -> str:
        """Give a segment to another owner; mappings and leases stay as they are.

        The label remembers where the segment came from, so that segments of different owners never meet
        under one name. Repeating an adoption, also one that a death cut short, changes nothing.

        Returns:
            The new name, which depends on the arguments only.

        Raises:
            SegmentMissingError: it is under neither name.
            SegmentExistsError: the new name belongs to another segment.
            SegmentNameError: a part cannot be in a name.
        """
        old = self._parsed(name)
        origin = "" if "@" in old.label else f"@{old.owner.replace('/', '~')}.{old.incarnation}"
        self.name(owner, incarnation, "label")
        new = self._checked(SegmentName(self.run_id, owner, incarnation, old.label + origin))
        return self._move(name, new)

    def rename(self, name: str, owner: str, incarnation: int, label: str) -> str:
        """Give a segment another name; mappings and leases stay as they are.

        Returns:
            The new name.

        Raises:
            SegmentMissingError: it is under neither name.
            SegmentExistsError: the new name belongs to another segment.
            SegmentNameError: a part cannot be in a name.
        """
        self._parsed(name)
        return self._move(name, self.name(owner, incarnation, label))

    def link(self, name: str, owner: str, incarnation: int, label: str) -> str:
        """Give a segment one more name; its memory goes with the last name and the last mapping.

        Returns:
            The further name.

        Raises:
            SegmentMissingError: there is none.
            SegmentExistsError: the further name is taken.
            SegmentSpaceError: the file system has no room for a name.
            SegmentNameError: a part cannot be in a name.
        """
        self._parsed(name)
        further = self.name(owner, incarnation, label)
        try:
            with self._explained(further, 0):
                os.link(self.root / name, self.root / further)
        except FileNotFoundError as error:
            raise SegmentMissingError(name) from error
        return further

    def exists(self, name: str) -> bool:
        """Whether there is a segment of this name now."""
        self._parsed(name)
        return (self.root / name).exists()

    def inode(self, name: str) -> int:
        """Return what all names of the same memory have in common, for as long as it is mapped.

        Raises:
            SegmentMissingError: there is none.
            SegmentNameError: not a name of this run.
        """
        self._parsed(name)
        try:
            return (self.root / name).stat().st_ino
        except FileNotFoundError as error:
            raise SegmentMissingError(name) from error

    def unlink(self, name: str) -> None:
        """Remove a name; the memory goes with the last mapping. A missing one is fine.

        Raises:
            SegmentNameError: not a name of this run.
        """
        self._parsed(name)
        (self.root / name).unlink(missing_ok=True)

    def names(self, owner: str | None = None, incarnation: int | None = None) -> list[str]:
        """Return this run's names, sorted; only of that owner and incarnation where given."""
        return sorted(
            str(found)
            for found in _segments_in(self.root)
            if found.run_id == self.run_id
            and owner in (None, found.owner)
            and incarnation in (None, found.incarnation)
        )

    def sweep(self, owner: str | None = None, incarnation: int | None = None) -> list[str]:
        """Unlink everything that `names` returns, and return it.

        A list of `leavings` goes with the files it names, and stays as long as somebody has one of them.
        """
        swept = []
        for name in self.names(owner, incarnation):
            if self._parsed(name).label != leavings.LABEL or leavings.remove(self.root / name):
                self.unlink(name)
                swept.append(name)
        return swept

    def free_bytes(self) -> int:
        """Return how many bytes the file system would still give."""
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize

    @contextlib.contextmanager
    def _opened_new(self, name: str, nbytes: int) -> Iterator[int]:
        with self._explained(name, nbytes):
            fd = os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with self._explained(name, nbytes):
                os.posix_fallocate(fd, 0, nbytes)
            yield fd
        except BaseException:
            self.unlink(name)
            raise
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _explained(self, name: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise SegmentExistsError(name) from error
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise SegmentSpaceError(name, self.root, nbytes, self.free_bytes()) from error
            raise

    @contextlib.contextmanager
    def _opened(self, name: str, *, writable: bool) -> Iterator[int]:
        self._parsed(name)
        try:
            fd = os.open(self.root / name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SegmentMissingError(name) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _move(self, old: str, new: str) -> str:
        # rename(2) silently replaces; a link does not, and leaves no moment without a name.
        if old == new:
            return new
        try:
            (self.root / new).hardlink_to(self.root / old)
        except FileNotFoundError as error:
            if not (self.root / new).exists():
                raise SegmentMissingError(old) from error
        except FileExistsError as error:
            if not (self.root / new).samefile(self.root / old):
                raise SegmentExistsError(new) from error
        self.unlink(old)
        return new

    def _parsed(self, name: str) -> SegmentName:
        parsed = parse_name(name)
        if parsed.run_id != self.run_id:
            raise SegmentNameError(f"name in run {self.run_id}", name)
        return parsed

    def _checked(self, name: SegmentName) -> str:
        text = str(name)
        if len(text) > _MAX_NAME_BYTES:
            raise SegmentNameError(f"name (at most {_MAX_NAME_BYTES} bytes)", text)
        return text


def _segments_in(root: Path) -> Iterator[SegmentName]:
    """Return the segments in a folder; there are none in one that is gone."""
    for path in root.iterdir() if root.exists() else ():
        with contextlib.suppress(SegmentNameError):
            yield parse_name(path.name)


def _mapped(name: str, fd: int, nbytes: int, *, writable: bool, populate: bool = False) -> Segment:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    return Segment(name, mmap.mmap(fd, nbytes, flags=flags, prot=protection))


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
