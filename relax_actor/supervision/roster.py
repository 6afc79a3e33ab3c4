"""Which incarnations there are, and how far each has come; a promoted spare is known by both its names."""

import msgspec

from relax_actor.actor import wire
from relax_actor.supervision.site import Key

ReadyWord = wire.Ready | wire.SpareReady


class Roster:
    """The incarnations of a tree, from their spawning to their end.

    Attributes:
        ready: who takes calls, or did.
        dying: who takes none any more, and is not gone.
        told_to_stop: whose end will be no surprise.
    """

    def __init__(self) -> None:
        self._born: dict[Key, wire.Spawned] = {}
        self._ahead: dict[Key, ReadyWord] = {}
        self._spares: dict[Key, str] = {}  # of who was promoted: its name as a spare
        self.ready: set[Key] = set()
        self.dying: set[Key] = set()
        self.told_to_stop: set[Key] = set()

    def spawned(self, record: wire.Spawned) -> ReadyWord | None:
        """Note that a process exists; return its word that it is ready, if that came before its agent's."""
        key = record.name, record.incarnation
        self._born[key] = record
        return self._ahead.pop(key, None)

    def is_ahead(self, word: ReadyWord) -> bool:
        """Keep an actor's word that it is ready until its agent has said that there is a process."""
        key = word.name, word.incarnation if isinstance(word, wire.Ready) else 1
        if key in self._born:
            return False
        self._ahead[key] = word
        return True

    def promoted(self, spare: Key, key: Key) -> wire.Spawned:
        """Note who a spare is from now on; return its process under that name."""
        name, incarnation = key
        self._spares[key] = spare[0]
        born = msgspec.structs.replace(self._born.pop(spare), name=name, incarnation=incarnation)
        self._born[key] = born
        return born

    def gone(self, key: Key) -> int:
        """Forget an incarnation; return the pid that it had, or 0."""
        self._spares.pop(key, None)
        self._ahead.pop(key, None)
        self.dying.discard(key)
        born = self._born.pop(key, None)
        return born.pid if born else 0

    def pid(self, name: str) -> int | None:
        """Return the pid of the incarnation that is there, if any."""
        return next((born.pid for born in self._born.values() if born.name == name), None)

    def as_spare(self, key: Key) -> Key | None:
        """Return who this was before it was promoted, if it was."""
        spare = self._spares.get(key)
        return None if spare is None else (spare, 1)

    def name_of(self, name: str, incarnation: int) -> Key:
        """Return who a process is that its agent may still know as a spare."""
        names = (key for key, spare in self._spares.items() if (spare, 1) == (name, incarnation))
        return next(names, (name, incarnation))
