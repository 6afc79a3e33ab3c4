"""What the two ends ask the process of a row queue, and what it answers."""

import msgspec

from relax_actor.ids import Holder, LeaseId
from relax_actor.row_queue.records import Dealt
from relax_actor.transfer_queue.records import Put


class Where(msgspec.Struct, frozen=True):
    """Queue to either end: where the rows are, and who carries them from and to other hosts."""

    host: str
    dock: str  # the name of an actor; empty where there is none


class PutAnswer(msgspec.Struct, frozen=True):
    """Queue to producer: what became of a put."""

    outcome: Put
    first: int  # the number of the first row


class Wanted(msgspec.Struct, frozen=True):
    """Consumer to queue: what it wants, and what it has."""

    group: str
    holder: Holder
    max_rows: int  # not looked at where the sampler deals turns
    rank: int  # which data-parallel rank, where it does
    held: list[LeaseId]  # others of its own were lost on their way, and are taken back
    acks: list[LeaseId]  # what it is done with
    wait_s: float


class Leased(msgspec.Struct, frozen=True):
    """Queue to consumer: rows, and what became of what it acknowledged."""

    dealt: Dealt | None
    acked: list[Put]
    is_finished: bool  # no row will ever come
    was_parked: bool  # the rows were not there when they were asked for
