"""Large frames between processes of one host, through pooled shared memory.

A frame of `BULK_BYTES` or more is written once into a segment of the sender's pool, and the message says
where. The receiver maps each segment once and looks at the frame in place; when the last view of it is gone,
the owner is told and uses the segment again. So the memory stays warm, and nothing is sent but names.

Invariants: a segment is written only while nobody may look at it, who is known by name: each receiver counts
until it says so or is gone. Segments are the sender's; the node agent's sweep removes those of the dead.
"""

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from relax_actor.actor.wire import BulkRef, Call, Result
from relax_actor.ids import Holder
from transport.control import Frame, Frames
from transport.errors import CodecError
from transport.shm import Segment, SegmentError, ShmSpace, parse_name

BULK_BYTES: Final = 2**20
BODY_BYTES: Final = 32 * 2**10
"""A packed value below this is part of the record: one frame less to send and read."""

GRAIN_BYTES: Final = 2 * 2**20
KEPT_BYTES: Final = 2**30
"""Segments nobody uses are kept up to this sum."""

MAPPED_SEGMENTS: Final = 64


class _Slot:
    """One segment of a pool and who may look at it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.holders: Counter[str] = Counter()

    def drop(self, holder: str) -> None:
        """Count one use less; a holder that has none is no error."""
        self.holders[holder] -= 1
        if self.holders[holder] <= 0:
            del self.holders[holder]


OWN: Final = ""
"""Stands for the sender itself among the holders."""


class Staged(msgspec.Struct, eq=False):
    """A packed value ready to be sent: in the record, in frames after it, and in shared memory."""

    body: bytes = b""
    frames: Frames = ()
    refs: tuple[BulkRef, ...] = ()
    inline_bytes: int = 0
    pool: "BulkPool | None" = None

    def sent_to(self, holder: str) -> None:
        """Note who may look at the shared frames."""
        if self.pool is not None:
            self.pool.hold(self.refs, holder)

    def release(self) -> None:
        """Let go of the shared frames; the receivers may still look at them. Called once a `stage`."""
        if self.pool is not None:
            self.pool.release([ref.segment for ref in self.refs], OWN)

    def without_shared_memory(self) -> "Staged":
        """Return it for a receiver on another host; this one is released."""
        if self.pool is None:
            return self
        frames = self.pool.copy_out(self.frames, self.refs)
        self.release()
        return Staged(frames=frames, inline_bytes=sum(memoryview(frame).nbytes for frame in frames))

    def share(self) -> "Staged":
        """Return it for another message; each is released by itself."""
        if self.pool is not None:
            self.pool.hold(self.refs, OWN)
        return self


NOTHING: Final = Staged()


class BulkPool:
    """The segments one process writes.

    Args:
        space: where shared memory is; None where there is none, and everything travels in messages.
        holder: who owns the segments.
    """

    def __init__(self, space: ShmSpace | None, holder: Holder) -> None:
        self._space, self._holder = space, holder
        self._lock = threading.Lock()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # least recently used first
        self._made = 0

    def rename(self, holder: Holder) -> None:
        """Own what is made from now on under another name."""
        self._holder = holder

    def stage(self, frames: Sequence[Frame], *, writable: bool, local: bool = True) -> Staged:
        """Make a packed value ready; large frames are copied into shared memory, others are not copied.

        Args:
            frames: as `codec.pack` made them.
            writable: there will be one receiver, once, and the copy is its own.
            local: the receiver is on this host, as far as is known.
        """
        if len(frames) == 1 and (nbytes := len(frames[0])) < BODY_BYTES:
            return Staged(bytes(frames[0]), (), (), nbytes)
        sizes = [memoryview(frame).nbytes for frame in frames]
        if self._space is None or not local or max(sizes) < BULK_BYTES:
            return Staged(frames=frames, inline_bytes=sum(sizes))
        return self._stage(frames, sizes, writable=writable)

    def copy_out(self, frames: Frames, refs: Sequence[BulkRef]) -> Frames:
        """Return all frames, copies of those in shared memory among them."""
        merged: list[Frame] = list(frames)
        for ref in refs:
            merged.insert(ref.frame, bytes(self._slots[ref.segment].segment.buf[: ref.nbytes]))
        return merged

    def hold(self, refs: Sequence[BulkRef], holder: str) -> None:
        """Count one more use of each segment."""
        with self._lock:
            for ref in refs:
                self._slots[ref.segment].holders[holder] += 1

    def release(self, segments: Sequence[str], holder: str) -> None:
        """Count one use less of each segment; unknown ones are no error."""
        with self._lock:
            for name in segments:
                if (slot := self._slots.get(name)) is not None:
                    slot.drop(holder)
            self._trim()

    def forget(self, holder: str) -> None:
        """A receiver is gone: it looks at nothing any more."""
        with self._lock:
            for slot in self._slots.values():
                slot.holders.pop(holder, None)
            self._trim()

    @property
    def used_segments(self) -> int:
        """How many segments somebody may look at."""
        return sum(1 for slot in self._slots.values() if slot.holders)

    def close(self) -> None:
        """Remove all segments; receivers keep what they mapped."""
        with self._lock:
            for name in list(self._slots):
                self._remove(name)

    def _stage(self, frames: Sequence[Frame], sizes: list[int], *, writable: bool) -> Staged:
        inline: list[Frame] = []
        refs: list[BulkRef] = []
        for index, (frame, nbytes) in enumerate(zip(frames, sizes, strict=True)):
            segment = self._acquire(nbytes) if nbytes >= BULK_BYTES else None
            if segment is None:
                inline.append(frame)
                continue
            segment.buf[:nbytes] = memoryview(frame).cast("B")
            refs.append(BulkRef(frame=index, segment=segment.name, nbytes=nbytes, writable=writable))
        inline_bytes = sum(memoryview(frame).nbytes for frame in inline)
        return Staged(frames=inline, refs=tuple(refs), inline_bytes=inline_bytes, pool=self)

    def _acquire(self, nbytes: int) -> Segment | None:
        """Take a free segment, or make one; None where shared memory has no room."""
        with self._lock:
            slot = self._free_slot(nbytes) or self._make(nbytes)
            if slot is None:
                return None
            slot.holders[OWN] += 1
            self._slots.move_to_end(slot.segment.name)
            return slot.segment

    def _free_slot(self, nbytes: int) -> _Slot | None:
        """Return one that is large enough and not far too large."""
        for slot in reversed(self._slots.values()):  # the warmest first
            if not slot.holders and nbytes <= slot.segment.nbytes <= 2 * nbytes + GRAIN_BYTES:
                return slot
        return None

    def _make(self, nbytes: int) -> _Slot | None:
        assert self._space is not None  # noqa: S101 - looked at by `stage`
        self._made += 1
        rounded = -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES
        try:
            segment = self._space.create(
                self._holder.name, self._holder.incarnation, f"bulk-{self._made}", rounded
            )
        except (SegmentError, OSError):
            return None
        slot = self._slots[segment.name] = _Slot(segment)
        return slot

    def _trim(self) -> None:
        free = [(name, slot.segment.nbytes) for name, slot in self._slots.items() if not slot.holders]
        surplus_bytes = sum(nbytes for _, nbytes in free) - KEPT_BYTES
        for name, nbytes in free:
            if surplus_bytes > 0:
                self._remove(name)
                surplus_bytes -= nbytes

    def _remove(self, name: str) -> None:
        slot = self._slots.pop(name)
        slot.segment.close()
        if self._space is not None:
            with suppress(OSError):
                self._space.unlink(name)


class BulkViews:
    """The segments of others that this process looks at.

    Args:
        space: where shared memory is; None where there is none.
        on_released: told by any thread, at any moment, that a view is gone; must neither wait nor lock.
    """

    def __init__(self, space: ShmSpace | None, on_released: Callable[[str], None]) -> None:
        self._space, self._on_released = space, on_released
        self._mapped: OrderedDict[str, Segment] = OrderedDict()

    def payload(self, record: Call | Result, frames: Frames) -> Frames:
        """Return the packed value that a record came with.

        Raises:
            CodecError: see `merge`.
        """
        if record.body:
            return (record.body,)
        return self.merge(frames[1:], record.bulk) if record.bulk else frames[1:]

    def merge(self, frames: Frames, refs: tuple[BulkRef, ...]) -> Frames:
        """Put the shared frames back among the others.

        Raises:
            CodecError: a segment is not there, or not so large; its owner is gone, or no owner of it.
        """
        merged: list[Frame] = list(frames)
        for ref in refs:
            merged.insert(ref.frame, self._view(ref))
        return merged

    def forget(self, holder: Holder) -> None:
        """Unmap what a process owned that is gone; views that live keep the memory."""
        for name in list(self._mapped):
            parsed = parse_name(name)
            if (parsed.owner, parsed.incarnation) == (holder.name, holder.incarnation):
                del self._mapped[name]

    def _view(self, ref: BulkRef) -> memoryview:
        try:
            flat: Any = self._segment(ref.segment).ndarray("uint8", (ref.nbytes,))
        except (SegmentError, OSError, ValueError) as error:
            raise CodecError("shared frame", str(error)) from error
        weakref.finalize(flat, self._on_released, ref.segment).atexit = False
        view: memoryview = memoryview(flat)
        return view if ref.writable else view.toreadonly()

    def _segment(self, name: str) -> Segment:
        segment = self._mapped.get(name)
        if segment is None:
            if self._space is None:
                raise SegmentError("this process has no shared memory")
            segment = self._mapped[name] = self._space.attach(name, writable=True)
            if len(self._mapped) > MAPPED_SEGMENTS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(name)
        return segment
