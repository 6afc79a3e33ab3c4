"""What is seen on other hosts, for observers on the head's: the head passes question and answer on."""

from collections.abc import Callable

import msgspec

from relax_actor.actor.wire import Look, Record, Seen

MAX_ASKED = 10_000
"""Questions that are not answered yet; an agent that died answers none, so the oldest are forgotten."""


class Sights:
    """The questions under way.

    Args:
        ask_host: asks the node agent of a host; False where there is none.
        tell: answers an observer.
    """

    def __init__(
        self, ask_host: Callable[[str, Record], bool], tell: Callable[[bytes, Seen], object]
    ) -> None:
        self._ask_host, self._tell = ask_host, tell
        self._asked: dict[int, tuple[bytes, int]] = {}
        self._last = 0

    def ask(self, observer: bytes, look: Look) -> None:
        """Ask the agent of the host that an observer wants to know of."""
        self._last += 1
        self._asked[self._last] = observer, look.id
        if len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        if not self._ask_host(look.host, msgspec.structs.replace(look, id=self._last)):
            self.answered(Seen(id=self._last))

    def answered(self, seen: Seen) -> None:
        """Give an agent's answer to who asked."""
        if (asked := self._asked.pop(seen.id, None)) is not None:
            observer, number = asked
            self._tell(observer, msgspec.structs.replace(seen, id=number))
