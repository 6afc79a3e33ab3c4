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
        loads: how many samples each has running.
        is_plenty: whether there is enough for all: only prompts with a favourite are not `me`'s.
        me: the one who asks.
    """

    def __init__(
        self, rooms: Mapping[Holder, int], loads: Mapping[Holder, int], *, me: Holder, is_plenty: bool
    ) -> None:
        self._rooms, self._loads, self._me, self._is_plenty = dict(rooms), dict(loads), me, is_plenty
        self._heap = [(load, holder != me, holder) for holder, load in loads.items()]
        heapq.heapify(self._heap)

    @property
    def is_over(self) -> bool:
        """Whether the one who asks gets no more."""
        return self._rooms[self._me] <= 0

    def is_mine(self, samples: int, favourite: Holder | None) -> bool:
        """Deal a prompt out; return whether the one who asks gets it."""
        to = favourite if favourite is not None and self._rooms.get(favourite, 0) > 0 else self._next()
        self._rooms[to] -= samples
        self._loads[to] += samples
        if not self._is_plenty and self._rooms[to] > 0:
            heapq.heappush(self._heap, (self._loads[to], to != self._me, to))
        return to == self._me

    def _next(self) -> Holder:
        if self._is_plenty:
            return self._me
        while True:
            load, _, holder = heapq.heappop(self._heap)
            if load == self._loads[holder] and self._rooms[holder] > 0:
                return holder
