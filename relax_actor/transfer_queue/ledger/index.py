"""Where to find the groups that can be leased now, without looking at those that cannot.

`file` derives a group's entries from the group itself after every change of it, so the two cannot drift.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from relax_actor.ids import GroupId, Holder, PolicyVersion
from relax_actor.transfer_queue.ledger.groups import Group, RowState
from relax_actor.transfer_queue.ledger.ordered import OrderedSet

K = TypeVar("K")


class _Entry(NamedTuple):
    waiting: bool
    holder: Holder | None
    version: PolicyVersion | None
    complete: bool


_NOWHERE = _Entry(waiting=False, holder=None, version=None, complete=False)


@dataclass(slots=True)
class Index:
    """Group ids by what can be done with them."""

    waiting: dict[Holder | None, OrderedSet[GroupId]] = field(default_factory=dict)
    """Groups with samples nobody samples, by the rollout that has the rest of the group (or None)."""
    started: dict[PolicyVersion, set[GroupId]] = field(default_factory=dict)
    """Train groups not dealt yet, by the version of their oldest token."""
    complete: dict[PolicyVersion, OrderedSet[GroupId]] = field(default_factory=dict)
    """Those of `started` that can be dealt."""
    _entries: dict[GroupId, _Entry] = field(default_factory=dict)

    def file(self, group: Group) -> None:
        """Enter a group as it is now."""
        self._replace(group.group_id, _entry(group))

    def remove(self, group_id: GroupId) -> None:
        """Forget a group."""
        self._replace(group_id, _NOWHERE)

    def next_waiting(self, holder: Holder) -> GroupId | None:
        """Return the lowest group of which this rollout may sample something."""
        firsts = [self.waiting[key].first() for key in (holder, None) if key in self.waiting]
        return min((first for first in firsts if first is not None), default=None)

    def too_old(self, oldest_allowed: int) -> list[GroupId]:
        """Return the groups, not dealt, that no trainer of now or later may train."""
        return sorted(
            group_id for version, ids in self.started.items() if version < oldest_allowed for group_id in ids
        )

    def _replace(self, group_id: GroupId, new: _Entry) -> None:
        old = self._entries.pop(group_id, _NOWHERE)
        if new != _NOWHERE:
            self._entries[group_id] = new
        if old != new:
            self._take_out(group_id, old)
            self._put_in(group_id, new)

    def _take_out(self, group_id: GroupId, entry: _Entry) -> None:
        if entry.waiting:
            _discard(self.waiting, entry.holder, group_id)
        if entry.version is not None:
            _discard(self.started, entry.version, group_id)
        if entry.version is not None and entry.complete:
            _discard(self.complete, entry.version, group_id)

    def _put_in(self, group_id: GroupId, entry: _Entry) -> None:
        if entry.waiting:
            self.waiting.setdefault(entry.holder, OrderedSet()).add(group_id)
        if entry.version is not None:
            self.started.setdefault(entry.version, set()).add(group_id)
        if entry.version is not None and entry.complete:
            self.complete.setdefault(entry.version, OrderedSet()).add(group_id)


def _entry(group: Group) -> _Entry:
    dealable = group.is_train and not group.dealt
    return _Entry(
        waiting=group.count(RowState.WAITING) > 0,
        holder=group.holder,
        version=group.oldest_version if dealable else None,
        complete=dealable and group.complete,
    )


def _discard(sets: dict[K, OrderedSet[GroupId]] | dict[K, set[GroupId]], key: K, group_id: GroupId) -> None:
    sets[key].discard(group_id)
    if not sets[key]:
        del sets[key]
