"""The status page: what an actor is doing, in 4 KiB of shared memory that outlive its death.

The node agent makes a page for each incarnation; the actor writes it with plain stores, no lock and no system
call, and whoever is on the host may read it at any moment, also while the actor hangs and after `kill -9`.

Invariants
- The page says that a call has begun BEFORE its method runs, and that it is over AFTER it ran. So a call
  whose id is above everything its sender's slot says has not begun; this is what makes `executed` exact.
- What `executed` rests on is written a word at a time, which no death can tear. A record that spans several
  words has its number at both ends; a reader that meets two different numbers met a write half done, looks
  again, and after a death goes without.
- The robust mutex is held by the actor's I/O thread from before it is ready to its end (see `robust`).
"""

import hashlib
import math
import os
import struct
import time
from enum import IntEnum
from typing import Any

import msgspec

from relax_actor.actor.robust import MUTEX_BYTES, RobustMutex, Semaphore
from relax_actor.actor.wire import CallMark, Dying
from relax_actor.actor.work import WorkWriter, padded, text_of
from relax_actor.errors import Executed
from transport.segment import Segment, SegmentMissingError
from transport.shm import ShmSpace

PAGE_BYTES = 4096
LABEL = "page"
SLOTS = 64
"""Senders whose calls are told apart; the calls of further ones may or may not have run."""

METHOD_BYTES = 64
PROGRESS_BYTES = 256
DEVICES_BYTES = 64

_MAGIC = b"RXP1"
_HEAD = struct.Struct("<4sII")  # magic, incarnation, pid
_TICK = struct.Struct("<dII")  # monotonic s, mailbox, tasks
_CALL = struct.Struct(f"<QQdQ{METHOD_BYTES}sQ")  # number, id, since (monotonic s), sender, method, number
_PROGRESS = struct.Struct(f"<Qd{PROGRESS_BYTES}sQ")  # number, at (monotonic s), text, number
_SLOT = struct.Struct("<QQQ")  # sender, highest id begun, last id over
_STATE = struct.Struct("<Q")  # state, plus `_OVERFLOWED` once there are more senders than slots
_OVERFLOWED = 1 << 8

_LEASE = struct.Struct("d")  # CLOCK_BOOTTIME s; native, so that it is one store

_HEAD_AT, _STATE_AT, _TICK_AT, _LEASE_AT = 0, 16, 24, 40
_MUTEX_AT = 64
_HELD_AT = _MUTEX_AT + MUTEX_BYTES
_CALL_AT = 192
_PROGRESS_AT = 320
_DEVICES_AT = 640
_SLOTS_AT = 1024
_LOOKS = 3


class PageState(IntEnum):
    """How far an incarnation has come."""

    UNBORN = 0  # nothing of the actor has run yet
    STARTING = 1
    READY = 2
    STOPPING = 3


class PageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says; times are CLOCK_MONOTONIC seconds of the host."""

    incarnation: int
    pid: int = 0
    state: str = PageState.UNBORN.name
    tick_s: float = 0.0  # when the I/O thread last looked
    mailbox_messages: int = 0  # as of the tick
    tasks: int = 0  # asynchronous calls in hand, as of the tick
    calls_begun: int = 0
    method: str = ""  # the last call to begin, if it is not over
    call_id: int = 0
    call_sender: int = 0  # its `sender_key`
    method_since_s: float = 0.0
    progress: str = ""
    progress_at_s: float = 0.0
    devices: str = ""
    marks: tuple[CallMark, ...] = ()
    marks_are_complete: bool = True  # whether a sender without a mark has begun nothing


def sender_key(name: str, incarnation: int) -> int:
    """Return the 64 bits by which a page knows one incarnation of a sender; never 0."""
    digest = hashlib.blake2b(f"{name}#{incarnation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def create(space: ShmSpace, name: str, incarnation: int) -> Segment:
    """Make the page of an incarnation that is about to be started.

    Raises:
        SegmentError: the memory cannot be had, or the incarnation has a page.
    """
    segment = space.create(name, incarnation, LABEL, PAGE_BYTES)
    mutex(segment).initialise()
    held(segment).initialise()
    hold_until(segment, math.inf)
    _HEAD.pack_into(segment.buf, _HEAD_AT, _MAGIC, incarnation, 0)
    return segment


def hold_until(segment: Segment, until_s: float) -> None:
    """Say, as the node agent, until when its lease holds; CLOCK_BOOTTIME seconds, infinity for ever."""
    _LEASE.pack_into(segment.buf, _LEASE_AT, until_s)


def mutex(segment: Segment) -> RobustMutex:
    """Return the page's mutex, which the actor holds while it lives."""
    return RobustMutex(segment.buf, _MUTEX_AT)


def held(segment: Segment) -> Semaphore:
    """Return the page's semaphore, which is posted once the mutex is held."""
    return Semaphore(segment.buf, _HELD_AT)


class PageWriter:
    """The actor's own end of its page. A fork of the actor has none: there every method does nothing.

    Attributes:
        work: the part that says whether the actor hangs.
    """

    def __init__(self, space: ShmSpace, name: str, incarnation: int, devices: str = "") -> None:
        self._segment = space.attach(space.name(name, incarnation, LABEL), writable=True)
        self._mutex, self._held = mutex(self._segment), held(self._segment)
        self._number = self._progress_number = self._overflowed = 0
        self._slots: dict[tuple[str, int], tuple[int, int]] = {}  # sender: key, first word of its slot
        self._methods: dict[str, bytes] = {}
        self.work = WorkWriter(self._segment.buf)
        self._use(self._segment.buf)
        _HEAD.pack_into(self._memory, _HEAD_AT, _MAGIC, incarnation, os.getpid())
        self._memory[_DEVICES_AT : _DEVICES_AT + DEVICES_BYTES] = padded(devices, DEVICES_BYTES)
        self.set_state(PageState.STARTING)
        os.register_at_fork(after_in_child=self._abandon)

    def hold(self) -> None:
        """Hold the mutex for as long as the calling thread lives; the agent hears of its end."""
        self._mutex.lock()
        self._held.post()

    @property
    def held_until_s(self) -> float:
        """Until when the node agent's lease holds; CLOCK_BOOTTIME seconds."""
        until_s: float = _LEASE.unpack_from(self._memory, _LEASE_AT)[0]
        return until_s

    @property
    def is_ready(self) -> bool:
        """Whether the actor takes messages."""
        return self._state is PageState.READY

    def set_state(self, state: PageState) -> None:
        """Say how far the actor has come."""
        self._state = state
        self._words[_STATE_AT // 8] = state | self._overflowed

    def begin(self, sender: str, sender_incarnation: int, call_id: int, method: str) -> None:
        """Say that a call begins; before its method runs."""
        slot = self._slots.get((sender, sender_incarnation)) or self._new_slot(sender, sender_incarnation)
        name = self._methods.get(method) or self._new_method(method)
        key, word = slot
        self._number = number = self._number + 1
        _CALL.pack_into(self._memory, _CALL_AT, number, call_id, time.monotonic(), key, name, number)
        if word and call_id > self._words[word + 1]:
            self._words[word + 1] = call_id

    def end(self, sender: str, sender_incarnation: int, call_id: int) -> None:
        """Say that a call is over; after its method returned or raised."""
        _, word = self._slots.get((sender, sender_incarnation), (0, 0))
        if word:
            self._words[word + 2] = call_id

    def progress(self, text: str) -> None:
        """Say in the user's own words how far the work has come."""
        self._progress_number = number = self._progress_number + 1
        data, now = padded(text, PROGRESS_BYTES), time.monotonic()
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, number, now, data, number)
        self.work.moved(now)

    def tick(self, mailbox_messages: int, tasks: int) -> None:
        """Say that the I/O thread runs, and how much waits."""
        _TICK.pack_into(self._memory, _TICK_AT, time.monotonic(), mailbox_messages, tasks)

    def _new_slot(self, sender: str, incarnation: int) -> tuple[int, int]:
        index, key = len(self._slots), sender_key(sender, incarnation)
        word = (_SLOTS_AT + index * _SLOT.size) // 8 if index < SLOTS else 0
        self._slots[sender, incarnation] = key, word
        if word:
            self._words[word] = key
        else:
            self._overflowed = _OVERFLOWED
            self.set_state(self._state)
        return key, word

    def _new_method(self, method: str) -> bytes:
        return self._methods.setdefault(method, padded(method, METHOD_BYTES))

    def _use(self, memory: memoryview) -> None:
        self._memory, self._words = memory, memory.cast("Q")

    def _abandon(self) -> None:
        self._use(memoryview(bytearray(PAGE_BYTES)))  # the page is the parent's; the child writes to nothing
        self.work.use(self._memory)


class PageView:
    """Anyone's end of a page."""

    @staticmethod
    def read(space: ShmSpace, name: str, incarnation: int) -> PageRecord | None:
        """Return what the page of an incarnation says now, or None where there is none."""
        try:
            with space.attach(space.name(name, incarnation, LABEL)) as segment:
                return read(bytes(segment.buf), lambda: bytes(segment.buf))
        except SegmentMissingError:
            return None


def dying(name: str, incarnation: int, reason: str, record: PageRecord | None) -> Dying:
    """Return the news of an actor's death with what its page says of the calls it had."""
    if record is None:
        return Dying(name=name, incarnation=incarnation, reason=reason)
    return Dying(
        name=name,
        incarnation=incarnation,
        reason=reason,
        marks=record.marks,
        marks_are_complete=record.marks_are_complete,
        running_sender=record.call_sender,
        running_id=record.call_id,
    )


def executed(dying: Dying, sender: int, call_id: int) -> Executed:
    """Return what a dead actor's page knows of one call.

    Args:
        dying: what its node agent said; `sender` is a `sender_key`.
        sender: who sent the call.
        call_id: which call.
    """
    mark = next((mark for mark in dying.marks if mark.sender == sender), None)
    if mark is None:
        return Executed.NO if dying.marks_are_complete else Executed.MAYBE
    if call_id > mark.begun:
        return Executed.NO
    return Executed.DONE if call_id == mark.over else Executed.MAYBE


def read(data: bytes, again: Any = None) -> PageRecord | None:
    """Return what the bytes of a page say.

    Args:
        data: `PAGE_BYTES` bytes.
        again: gives them anew, for when a write was half done.
    """
    for _ in range(_LOOKS if again else 0):
        if _is_steady(_CALL, data, _CALL_AT) and _is_steady(_PROGRESS, data, _PROGRESS_AT):
            break
        data = again()
    magic, incarnation, pid = _HEAD.unpack_from(data, _HEAD_AT)
    if magic != _MAGIC:
        return None
    (state,) = _STATE.unpack_from(data, _STATE_AT)
    tick_s, mailbox, tasks = _TICK.unpack_from(data, _TICK_AT)
    marks = _marks(data)
    return PageRecord(
        incarnation=incarnation,
        pid=pid,
        state=PageState(state % _OVERFLOWED).name,
        tick_s=tick_s,
        mailbox_messages=mailbox,
        tasks=tasks,
        devices=text_of(data[_DEVICES_AT : _DEVICES_AT + DEVICES_BYTES]),
        marks=marks,
        marks_are_complete=state < _OVERFLOWED,
        **_call(data, marks),
        **_progress(data),
    )


def _call(data: bytes, marks: tuple[CallMark, ...]) -> dict[str, Any]:
    number, call_id, since_s, sender, method, _ = _CALL.unpack_from(data, _CALL_AT)
    is_over = any(mark.sender == sender and mark.over == call_id for mark in marks)
    if not number or is_over or not _is_steady(_CALL, data, _CALL_AT):
        return {"calls_begun": number}
    return {
        "calls_begun": number,
        "call_id": call_id,
        "call_sender": sender,
        "method": text_of(method),
        "method_since_s": since_s,
    }


def _progress(data: bytes) -> dict[str, Any]:
    _, at_s, text, _ = _PROGRESS.unpack_from(data, _PROGRESS_AT)
    if not _is_steady(_PROGRESS, data, _PROGRESS_AT):
        return {}
    return {"progress": text_of(text), "progress_at_s": at_s}


def _marks(data: bytes) -> tuple[CallMark, ...]:
    slots = (_SLOT.unpack_from(data, _SLOTS_AT + index * _SLOT.size) for index in range(SLOTS))
    return tuple(CallMark(sender=sender, begun=begun, over=over) for sender, begun, over in slots if sender)


def _is_steady(record: struct.Struct, data: bytes, at: int) -> bool:
    return data[at : at + 8] == data[at + record.size - 8 : at + record.size]
