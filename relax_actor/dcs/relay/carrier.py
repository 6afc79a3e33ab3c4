"""What a group of stores is carried by: broadcasts from rank 0, in place, each with a deadline.

A group is an object of its own, outside of `torch.distributed`'s global state, and so is the store that its
ranks meet in; a rank that is lost makes every broadcast fail, at once where its process is dead and after
the deadline where it stands still. What broke stays broken: a new group is another object.
"""

import contextlib
import importlib
import re
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from relax_actor.dcs.relay.group import Seat
from relax_actor.errors import RelaxError

DEADLINE_S: Final = 0.7
"""The most that a broadcast, or the forming of a group, waits for a rank that stands still."""

IN_FLIGHT: Final = 3
"""Pieces under way at once: a piece is sent only when its receiver has said where it goes."""


class GroupBrokenError(RelaxError):
    """A rank of the group is lost, or was too late; nothing comes by this group any more.

    Args:
        epoch: which group it was.
        fact: what the library said.
    """

    def __init__(self, epoch: int, fact: str) -> None:
        self.epoch, self.fact = epoch, fact
        super().__init__(f"the group of epoch {epoch} broke: {fact}")


class Carrier(Protocol):
    """One group, from joining it to its end."""

    def begin(self, data: memoryview) -> None:
        """Start a broadcast: of rank 0's bytes, into everybody else's, which all have as many."""
        ...

    def wait(self) -> None:
        """Wait for the oldest broadcast that was started.

        Raises:
            GroupBrokenError: a rank is lost or late.
        """
        ...

    def close(self) -> None:
        """Leave; afterwards no byte is written any more. Idempotent."""
        ...


class GlooCarrier:
    """A gloo group over TCP.

    Args:
        seat: this rank's place.
        host: the address by which the others reach this rank.
        store: where they meet, in rank 0; None opens the one the seat tells of.
        deadline_s: of each broadcast, and of joining.

    Raises:
        GroupBrokenError: not all came in time.
    """

    def __init__(self, seat: Seat, host: str, store: Any = None, *, deadline_s: float = DEADLINE_S) -> None:
        self._epoch = seat.epoch
        self._torch: Any = importlib.import_module("torch")
        distributed: Any = importlib.import_module("torch.distributed")
        self._works: deque[Any] = deque()
        deadline = timedelta(seconds=deadline_s)
        with self._explained():
            where = urlsplit(seat.rendezvous)
            self._store = store or distributed.TCPStore(
                where.hostname, where.port, is_master=False, wait_for_workers=False, timeout=deadline
            )
            self._store.set_timeout(deadline)
            options = distributed.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no public name for it
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001 - as above
            options._timeout = deadline  # noqa: SLF001 - as above
            self._group: Any = distributed.ProcessGroupGloo(
                distributed.PrefixStore(f"{seat.epoch}", self._store), seat.rank, seat.size, options
            )

    def begin(self, data: memoryview) -> None:
        """Start a broadcast; `data` may be read-only in rank 0."""
        from relax_actor.dcs.layout import bytes_tensor  # noqa: PLC0415 - it needs numpy

        with self._explained():
            self._works.append(self._group.broadcast(bytes_tensor(data), 0))

    def wait(self) -> None:
        """Wait for the oldest broadcast that was started."""
        with self._explained():
            self._works.popleft().wait()

    def close(self) -> None:
        """Leave, and see every broadcast end."""
        if self._group is None:
            return
        self._group.abort()
        while self._works:
            with contextlib.suppress(RuntimeError):
                self._works.popleft().wait()
        self._group = self._store = None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupBrokenError(self._epoch, _fact(error)) from error


def _fact(error: RuntimeError) -> str:
    """Leave out where in the library's source it happened, and its advice."""
    said = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error))
    return said.partition(". This is typically")[0]
