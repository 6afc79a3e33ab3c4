"""What one shared-memory segment is: its name, its mapping, its lock, and what can go wrong with it."""

import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transport.closing import Closing

if TYPE_CHECKING:
    import numpy.typing as npt

_NAME = re.compile(
    r"rx-(?P<run>[A-Za-z0-9_]+)-(?P<owner>[A-Za-z0-9_~-]+)\.(?P<incarnation>0|[1-9][0-9]*)-(?P<label>[A-Za-z0-9._@~-]+)"
)


class SegmentError(Exception):
    """Base of what can go wrong with shared memory."""


class SegmentNameError(SegmentError, ValueError):
    """A name, or a part of one, that cannot be a segment's."""

    def __init__(self, part: str, value: object) -> None:
        self.part, self.value = part, value
        super().__init__(f"{value!r} cannot be the {part} of a shared-memory segment")


class SegmentMissingError(SegmentError):
    """There is no such segment, or it has no bytes yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no shared-memory segment `{name}`")


class SegmentExistsError(SegmentError):
    """The name is taken; nothing was changed."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"shared-memory segment `{name}` exists already")


class SegmentBusyError(SegmentError):
    """Someone holds the segment for itself alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"shared-memory segment `{name}` is being rewritten")


class SegmentSpaceError(SegmentError):
    """The file system has no room for a segment; nothing was left behind."""

    def __init__(self, name: str, root: Path, need_bytes: int, have_bytes: int) -> None:
        self.name, self.root, self.need_bytes, self.have_bytes = name, root, need_bytes, have_bytes
        super().__init__(
            f"shared-memory segment `{name}` needs {need_bytes} bytes, {root} has {have_bytes}"
            f"\n\nhint: make {root} larger (docker: --shm-size), or end the runs that fill it"
        )


class SegmentName(NamedTuple):
    """What a segment's name says."""

    run_id: str
    owner: str  # an actor's name, or whatever else owns memory
    incarnation: int  # from 0
    label: str

    def __str__(self) -> str:
        owner = self.owner.replace("/", "~")
        return f"rx-{self.run_id}-{owner}.{self.incarnation}-{self.label}"


def parse_name(name: str) -> SegmentName:
    """Read a segment's name.

    Raises:
        SegmentNameError: it is not the name of a segment.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise SegmentNameError("name", name)
    run_id, owner, incarnation, label = match.groups()
    return SegmentName(run_id, owner.replace("~", "/"), int(incarnation), label)


class Segment(Closing):
    """A mapped segment. Made by `ShmSpace` and `Mappings`, never directly.

    Attributes:
        name: the name it was mapped under.
        nbytes: its length.
    """

    def __init__(self, name: str, mapping: mmap.mmap, buf: memoryview | None = None) -> None:
        self.name = name
        self.nbytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._buf: memoryview | None = memoryview(mapping) if buf is None else buf

    @property
    def buf(self) -> memoryview:
        """All bytes, uint8 [nbytes]; read-only unless mapped as writable.

        Raises:
            ValueError: the segment is closed.
        """
        if self._buf is None:
            raise ValueError(f"shared-memory segment `{self.name}` is closed")
        return self._buf

    @property
    def file_bytes(self) -> int:
        """The file's length now; if it is below `nbytes`, touching the end is a SIGBUS.

        Raises:
            ValueError: the segment is closed.
        """
        if self._mapping is None:
            raise ValueError(f"shared-memory segment `{self.name}` is closed")
        return self._mapping.size()

    def ndarray(self, dtype: "npt.DTypeLike", shape: tuple[int, ...], offset: int = 0) -> "npt.NDArray[Any]":
        """Return a view of `shape` that starts `offset` bytes into the segment.

        Raises:
            ValueError: the view would not lie within the segment, or the segment is closed.
        """
        import numpy as np  # noqa: PLC0415 - the node agent has segments and no arrays

        need_bytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + need_bytes > self.nbytes:
            raise ValueError(
                f"{need_bytes} bytes at {offset} are not within `{self.name}` of {self.nbytes} bytes"
            )
        return np.ndarray(shape, dtype, buffer=self.buf, offset=offset)

    def close(self) -> None:
        """Forget the mapping; it goes at once, or with the last view of it. Idempotent."""
        # Dropped, not released: numpy and torch point into the memory without exporting the buffer, so a
        # release would succeed and leave their views dangling. Reference counts know better.
        self._buf = self._mapping = None


class SegmentLock:
    """The exclusive right to a segment, until `close` or the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Give the right back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
