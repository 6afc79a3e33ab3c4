"""What is put into the queue, and the shared memory it lies in, taken over together.

Rows stay where their producers wrote them. Putting a row renames its segment to the queue, so that the death
of its producer does not take it away; a segment that holds nothing the ledger wants goes at once.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from relax_actor.ids import Holder
from relax_actor.protocol import PromptGroup, SampleChunk, SampleReady
from relax_actor.transfer_queue.ledger import Ledger
from relax_actor.transfer_queue.memory import Memory
from relax_actor.transfer_queue.records import Put
from relax_actor.transfer_queue.storage import refs_of, renamed
from transport.shm import SegmentMissingError, ShmSpace

T = TypeVar("T")
S = TypeVar("S", SampleReady, SampleChunk)

OWNER = "rows"
"""Who owns adopted segments: not an actor, so that no actor's death sweeps them."""


class Intake:
    """Hands records to the ledger under the names their segments have from then on.

    Making one frees what a queue that died was just taking in, or just freeing.

    Args:
        space: where the rows lie.
        ledger: who decides; only its puts are called.
        memory: who counts, and frees.
    """

    def __init__(self, space: ShmSpace, ledger: Ledger, memory: Memory) -> None:
        self._space, self._ledger, self._memory = space, ledger, memory
        needed = ledger.segments()
        for name in space.names(OWNER):
            if name not in needed:
                space.unlink(name)

    def prompts(self, groups: Sequence[PromptGroup], now: float) -> bool:
        """Take prompts, each once; return whether all their segments were there."""
        whole = True
        for segment, members in _by_segment(groups, lambda group: group.tokens.segment):
            adopted = self._adopt(segment)
            if adopted is None:  # their writer is gone; its next incarnation writes them again
                whole = False
                continue
            for group in members:
                self._ledger.submit(renamed(group, segment, adopted), now)
            self._count(adopted, members)
        return whole

    def samples(self, samples: Sequence[SampleReady], holder: Holder, now: float) -> list[Put]:
        """Take samples; return what became of each, in their order within a segment."""
        return self._take(samples, lambda members: self._ledger.put_samples(members, holder, now))

    def chunks(self, chunks: Sequence[SampleChunk], holder: Holder, now: float) -> list[Put]:
        """Take parts of samples, as `samples` does."""

        def put(members: list[SampleChunk]) -> list[Put]:
            return [self._ledger.put_chunk(chunk, holder, now) for chunk in members]

        return self._take(chunks, put)

    def _take(self, rows: Sequence[S], put: Callable[[list[S]], list[Put]]) -> list[Put]:
        outcomes: list[Put] = []
        for segment, members in _by_segment(rows, lambda row: row.tokens.segment):
            adopted = self._adopt(segment)
            if adopted is None:  # freed long ago, or swept with its writer: a repetition, or too late
                outcomes += [Put.STALE] * len(members)
                continue
            outcomes += put([renamed(row, segment, adopted) for row in members])
            self._count(adopted, members)
        return outcomes

    def _adopt(self, segment: str) -> str | None:
        try:
            return self._space.adopt(segment, OWNER, 1)
        except SegmentMissingError:
            return None

    def _count(self, segment: str, members: Sequence[PromptGroup | SampleReady | SampleChunk]) -> None:
        if self._ledger.needs(segment):
            self._memory.took(segment, (ref for member in members for ref in refs_of(member)))
        else:
            self._memory.free(segment)


def _by_segment(records: Sequence[T], segment: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    """Gather the records of one segment, in their order."""
    gathered: dict[str, list[T]] = {}
    for record in records:
        gathered.setdefault(segment(record), []).append(record)
    return list(gathered.items())
