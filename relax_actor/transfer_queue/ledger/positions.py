"""Which positions of the prompt stream are done with, and which comes next."""

from collections.abc import Iterable, Iterator
from itertools import count

from relax_actor.ids import GroupId
from relax_actor.transfer_queue.ledger.ordered import OrderedSet

_START = GroupId(0)


class Positions:
    """The prompt stream, from 0: a position is to come, outstanding, or settled (trained or dropped).

    Positions are taken in order, so settled ones are nearly a prefix: a watermark and a few extras say it.
    After a rewind, positions below the highest one taken may be to come again; those are `holes`.
    """

    def __init__(
        self, watermark: GroupId = _START, extras: Iterable[GroupId] = (), taken: Iterable[GroupId] = ()
    ) -> None:
        self.watermark = watermark
        self._extras = set(extras)
        self._advance()
        taken = set(taken)
        self._high = max({self.watermark - 1} | self._extras | taken) + 1
        below = range(self.watermark, self._high)
        self._holes = OrderedSet(p for p in below if p not in self._extras and p not in taken)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def extras(self) -> frozenset[GroupId]:
        """Settled positions above the watermark."""
        return frozenset(self._extras)

    def next(self) -> GroupId:
        """Return the lowest position to come."""
        hole = self._holes.first()
        return GroupId(self._high if hole is None else hole)

    def upcoming(self, count: int) -> list[GroupId]:
        """Return the `count` lowest positions to come, in the order they are to be taken."""
        holes = self._holes.smallest(count)
        fresh = range(self._high, self._high + count - len(holes))
        return [GroupId(position) for position in (*holes, *fresh)]

    def take(self, position: GroupId) -> None:
        """Make the next position outstanding."""
        self._holes.discard(position)
        self._high = max(self._high, position + 1)

    def settle(self, position: GroupId) -> None:
        """Be done with an outstanding position."""
        self._extras.add(position)
        self._advance()

    def settled(self, position: GroupId) -> bool:
        """Whether this position is trained or dropped."""
        return position < self.watermark or position in self._extras

    def unsettled(self) -> Iterator[GroupId]:
        """Yield the positions that are not settled, upwards, without end."""
        return (GroupId(p) for p in count(self.watermark) if p not in self._extras)

    def _advance(self) -> None:
        while self.watermark in self._extras:
            self._extras.remove(self.watermark)
            self.watermark = GroupId(self.watermark + 1)
