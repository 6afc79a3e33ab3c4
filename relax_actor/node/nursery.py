"""Actors that are ordered but not yet born: what is prepared for them, and who is asked to fork them.

Births overlap: an order is passed on at once and its answer taken when it comes, so that a slow fork delays
neither the next birth nor the news of a death. Every method runs in the agent's loop thread.

A zygote whose imports leave it unfit to fork is not used: its actors start in interpreters of their own.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from relax_actor.actor.wire import NodeConfig, Record, Spawn, Spawned
from relax_actor.node import exec, process  # noqa: A004 - what the module does
from relax_actor.node.children import Children
from relax_actor.node.preload import Imported
from relax_actor.node.zygotes import Zygote
from transport.control import Frames
from transport.segment import Segment

MAX_TRIES = 2
"""Zygotes that may end over one order."""

STILL_S = 5.0
"""How long a zygote may take over an actor that is to be killed; it stands still, or the machine does."""

CLOSE_S = 1.0
"""How long each birth under way may take when the agent ends."""


class _Order(msgspec.Struct, eq=False):
    spawn: Spawn
    arguments: Frames
    segment: Segment
    tries: int = 1
    is_killed: bool = False  # before it was born


class _Source:
    """The zygote of one name, and the orders it has not answered, the oldest first."""

    def __init__(self, name: str, zygote: Zygote) -> None:
        self.name = name
        self.zygote: Zygote | None = zygote
        self.is_unfit = False  # its imports do not allow a fork
        self.has_imported = False
        self.orders: deque[_Order] = deque()


class Nursery:
    """Brings actors into the world.

    Args:
        config: what all processes of the run have in common.
        zygotes: the first ones, by name; they may still import.
        pipe: read end of the death pipe.
        children: takes who was born.
        say: sends a record to the head.
        warn: called with the name of a zygote that is not used, and why.
    """

    def __init__(  # noqa: PLR0917 - the agent makes one, once
        self,
        config: NodeConfig,
        zygotes: Mapping[str, Zygote],
        pipe: int,
        children: Children,
        say: Callable[[Record], object],
        warn: Callable[[str, str], object],
    ) -> None:
        self._config, self._pipe, self._children, self._say, self._warn = config, pipe, children, say, warn
        self._sources = {name: _Source(name, zygote) for name, zygote in zygotes.items()}
        self._loop = asyncio.get_running_loop()

    def open(self) -> str:
        """Wait until all zygotes have imported; return what went wrong, or nothing."""
        return "\n".join(filter(None, map(self._open, self._sources)))

    @property
    def pids(self) -> set[int]:
        """The pids of the zygotes."""
        return {source.zygote.pid for source in self._sources.values() if source.zygote}

    def order(self, spawn: Spawn, arguments: Frames) -> None:
        """Have an actor born; the head is told of its birth, or of its end."""
        spawn, segment, error = self._children.prepare(spawn)
        if segment is None:
            self._children.refuse(spawn, error)
        elif spawn.python or not spawn.zygote:
            self._execute(_Order(spawn, arguments, segment))
        elif spawn.zygote not in self._sources:
            self._children.refuse(spawn, f"there is no zygote {spawn.zygote!r}")
        else:
            self._ask(spawn.zygote, _Order(spawn, arguments, segment))

    def kill(self, name: str, incarnation: int) -> bool:
        """Have an actor killed as soon as it is born; False where it is not among the unborn."""
        for source in self._sources.values():
            for order in source.orders:
                if (order.spawn.name, order.spawn.incarnation) == (name, incarnation):
                    order.is_killed = True
                    self._loop.call_later(STILL_S, self._give_up, source, order)
                    return True
        return False

    def close(self) -> None:
        """Wait for the births under way, which are the agent's children to end, and end the zygotes."""
        for source in self._sources.values():
            while source.zygote and source.orders:
                if source.zygote.answers_within(CLOSE_S):
                    self._hear(source, may_replace=False)
                else:
                    self._lost(source, "it stood still", may_replace=False)
            if source.zygote:
                self._loop.remove_reader(source.zygote.fileno())
                source.zygote.close()

    def _open(self, name: str) -> str:
        source = self._sources[name]
        assert source.zygote is not None  # noqa: S101 - nothing was asked of it yet
        try:
            imported = source.zygote.imported()
        except EOFError:
            error, source.zygote = f"the zygote ended ({source.zygote.close()})", None
            return error
        self._imported(source, imported)
        if source.zygote is not None:
            self._watch(source)
        return imported.error

    def _ask(self, name: str, order: _Order) -> None:
        source = self._sources[name]
        if source.is_unfit:
            self._execute(order)
            return
        if source.zygote is None:
            self._replace(name)
        source.orders.append(order)
        if source.zygote is not None:
            source.zygote.ask(order.spawn, order.arguments)

    def _execute(self, order: _Order) -> None:
        self._born(order, *exec.start(self._config, order.spawn, order.arguments, pipe=self._pipe))

    def _watch(self, source: _Source) -> None:
        assert source.zygote is not None  # noqa: S101 - watched when it was made
        self._loop.add_reader(source.zygote.fileno(), self._hear_all, source)

    def _replace(self, name: str) -> None:
        """Start another zygote; while it imports, it may be asked."""
        source = self._sources[name]
        source.zygote = Zygote.executed(self._config, self._config.zygotes[name], self._pipe)
        source.has_imported = False
        self._watch(source)

    # -- answers --------------------------------------------------------------------------------

    def _hear_all(self, source: _Source) -> None:
        zygote = source.zygote
        while zygote is not None and source.zygote is zygote and zygote.has_answered:
            self._hear(source)

    def _hear(self, source: _Source, *, may_replace: bool = True) -> None:
        """Take the next answer; of a zygote that has ended none will come."""
        assert source.zygote is not None  # noqa: S101 - it is who is heard
        try:
            if not source.has_imported:
                self._imported(source, source.zygote.imported())
            else:
                answer = source.zygote.born()
                self._born(source.orders.popleft(), *answer)
        except EOFError as error:
            self._lost(source, f"{type(error).__name__}", may_replace=may_replace)

    def _imported(self, source: _Source, imported: Imported) -> None:
        source.has_imported, source.is_unfit = not imported.error, bool(imported.unfit)
        if imported.error:
            self._drop(source)
            self._refuse_all(source, imported.error)
        elif imported.unfit:
            self._drop(source)
            self._warn(source.name, imported.unfit)
            while source.orders:
                self._execute(source.orders.popleft())

    def _born(self, order: _Order, pid: int, error: str) -> None:
        spawn = order.spawn
        if not error:
            error = self._children.add(spawn, pid, order.segment)
        if error:
            self._children.refuse(spawn, error)
            return
        since = process.start_time(pid)
        self._say(Spawned(name=spawn.name, incarnation=spawn.incarnation, pid=pid, start_ticks=since))
        if order.is_killed:
            self._children.kill(spawn.name, spawn.incarnation)

    def _lost(self, source: _Source, error: str, *, may_replace: bool) -> None:
        """Ask another zygote for what the lost one had not answered, or give it up."""
        reason = f"the zygote ended ({self._drop(source)}): {error}"
        again = [
            order
            for order in source.orders
            if may_replace and order.tries < MAX_TRIES and not order.is_killed
        ]
        given_up = [order for order in source.orders if order not in again]
        source.orders.clear()
        for order in given_up:
            self._born(order, 0, reason)
        for order in again:
            order.tries += 1
            self._ask(order.spawn.zygote, order)

    def _give_up(self, source: _Source, order: _Order) -> None:
        """End a zygote that does not bring forth who is to die, unless it still imports for others."""
        is_wanted = not source.has_imported and not all(each.is_killed for each in source.orders)
        if order in source.orders and source.zygote is not None and not is_wanted:
            self._lost(source, "it stood still", may_replace=True)

    def _drop(self, source: _Source) -> str:
        zygote, source.zygote = source.zygote, None
        assert zygote is not None  # noqa: S101 - it has just been heard
        self._loop.remove_reader(zygote.fileno())
        return zygote.close()

    def _refuse_all(self, source: _Source, error: str) -> None:
        while source.orders:
            self._born(source.orders.popleft(), 0, error)
