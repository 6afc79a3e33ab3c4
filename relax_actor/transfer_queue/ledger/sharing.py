"""Whose a prompt is, where several replicas ask for some: fair shares, and prefixes where they were computed.

Prompts go one by one to the replica that has the fewest samples running, so that in-flight counts of replicas
that all have room differ by a prompt's samples at most. What is left of a prompt goes to the replica that had
the rest of it under the same policy version, for that one has its keys and values. Where there is enough to
fill everybody up, nobody's share ends before its room does.

Refused: shares fixed in advance, such as a prompt's id modulo the replicas (a slow one would get as many).
"""

import heapq
from collections.abc import Mapping

from relax_actor.ids import Holder


class Shares:
    """Deals prompts out, in the order they are asked about, among some replicas.

    Args:
        rooms: how many samples each can take.
        loads: how many samples each has running; None where there is enough to fill all of them.
        me: the one who asks.
    """

    def __init__(
        self, rooms: Mapping[Holder, int], loads: Mapping[Holder, int] | None, *, me: Holder
    ) -> None:
        self._rooms, self._loads, self._me = dict(rooms), dict(loads or {}), me
        self._is_plenty = loads is None
        self._heap = [(load, holder != me, holder) for holder, load in self._loads.items()]
        heapq.heapify(self._heap)

    @property
    def is_over(self) -> bool:
        """Whether the one who asks gets no more."""
        return self._rooms[self._me] <= 0

    def is_mine(self, samples: int, favourite: Holder | None) -> bool:
        """Deal a prompt out; return whether the one who asks gets it."""
        to = self._me if self._is_plenty else self._next()
        if favourite is not None and self._rooms.get(favourite, 0) > 0:
            to = favourite
        self._rooms[to] -= samples
        if not self._is_plenty:
            self._load(to, samples)
        return to == self._me

    def _next(self) -> Holder:
        """Return who has the least to do, of those with room."""
        while True:
            load, _, holder = self._heap[0]
            if load == self._loads[holder] and self._rooms[holder] > 0:
                return holder
            heapq.heappop(self._heap)

    def _load(self, holder: Holder, samples: int) -> None:
        self._loads[holder] += samples
        heapq.heappush(self._heap, (self._loads[holder], holder != self._me, holder))
