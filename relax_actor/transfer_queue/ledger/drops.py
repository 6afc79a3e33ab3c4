"""Which positions of the prompt stream were dropped: for good, whatever checkpoint the trainer goes back to.

One bit a position, for a run may filter half of a very long stream. A checkpoint has only those from its
watermark on, and sums of the others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from relax_actor.ids import GroupId
from relax_actor.transfer_queue.records import DroppedPosition, DropReason, TrainedSet

_START = GroupId(0)
_BITS = 8


class Drops:
    """Dropped positions, with the reason and the samples of each.

    Args:
        base: the first position that is known by itself.
        before: samples dropped below it.
    """

    def __init__(self, base: GroupId = _START, before: Mapping[DropReason, int] | None = None) -> None:
        self._base = base
        self._samples = Counter(before or {})
        self._marks: dict[tuple[DropReason, int], bytearray] = {}

    def __contains__(self, position: GroupId) -> bool:
        return any(_is_set(marks, position - self._base) for marks in self._marks.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Drops) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def samples(self) -> Mapping[DropReason, int]:
        """Dropped samples by reason."""
        return self._samples

    def add(self, position: GroupId, samples: int, reason: DropReason) -> None:
        """Drop a position, once."""
        marks = self._marks.setdefault((reason, samples), bytearray())
        byte, bit = divmod(position - self._base, _BITS)
        marks.extend(bytes(max(0, byte + 1 - len(marks))))
        marks[byte] |= 1 << bit
        self._samples[reason] += samples

    def since(self, watermark: GroupId) -> list[DroppedPosition]:
        """Return the dropped positions from `watermark` on, in order."""
        found = [
            DroppedPosition(group_id=GroupId(self._base + offset), samples=samples, reason=reason)
            for (reason, samples), marks in self._marks.items()
            for offset in _set_bits(marks, max(0, watermark - self._base))
        ]
        return sorted(found, key=lambda dropped: dropped.group_id)

    def before(self, watermark: GroupId) -> dict[DropReason, int]:
        """Return the samples dropped below `watermark`, by reason."""
        left = self._samples.copy()
        for dropped in self.since(watermark):
            left[dropped.reason] -= dropped.samples
        return {reason: samples for reason, samples in sorted(left.items()) if samples}

    def gone_back(self, trained: TrainedSet) -> "Drops":
        """Return these drops and a checkpoint's, each once.

        Where the checkpoint is of another queue, or from before this one began, what it has dropped below its
        watermark is known as sums.
        """
        below = Counter(trained.dropped_before)
        above = [dropped for dropped in trained.dropped if dropped.group_id >= trained.watermark]
        for dropped in trained.dropped:
            if dropped.group_id < trained.watermark:
                below[dropped.reason] += dropped.samples
        drops = self
        if trained.watermark < self._base or self.before(trained.watermark) != below:
            drops = Drops(trained.watermark, below)
            above += self.since(trained.watermark)
        for dropped in above:
            if dropped.group_id not in drops:
                drops.add(dropped.group_id, dropped.samples, dropped.reason)
        return drops


def _is_set(marks: bytearray, offset: int) -> bool:
    byte, bit = divmod(offset, _BITS)
    return 0 <= byte < len(marks) and bool(marks[byte] >> bit & 1)


def _set_bits(marks: bytearray, start: int) -> Iterator[int]:
    """Yield the set offsets from `start` on."""
    for byte in range(start // _BITS, len(marks)):
        if marks[byte]:
            offsets = range(byte * _BITS, (byte + 1) * _BITS)
            yield from (offset for offset in offsets if offset >= start and _is_set(marks, offset))
