"""Which groups make the next batch: oldest first, and never so that a later batch must be too stale.

A sample of version v may be trained by a trainer of version V while V - v <= max_staleness. A batch raises V
by one, so groups of version v fit into the batches at V, V+1, ..., v + max_staleness and no other. This is
scheduling with deadlines, and earliest deadline first is optimal: take the oldest complete groups. But groups
that still run, or wait for a reward, have their version too. So the batch also waits until what stays
outside fits into the batches that remain: of the groups of version v or older, at most
`groups_per_batch * (v + max_staleness - V)` may stay. For the oldest allowed version that number is 0: due
groups are in this batch.

While no version is skipped and every lease starts at the newest version, the window of
`groups_per_batch * (max_staleness + 1)` groups makes this always possible: no group is ever dropped as stale.

Refused: filling up by the lowest group id. With max_staleness 2 and one group a batch, groups 1 and 2 start
at version 0, group 3 at version 1 and is complete first; training it at version 1 leaves two groups due at 2.
"""

from collections.abc import Collection, Mapping

from relax_actor.ids import GroupId, PolicyVersion
from relax_actor.transfer_queue.ledger.ordered import OrderedSet


def choose_batch(
    started: Mapping[PolicyVersion, Collection[GroupId]],
    complete: Mapping[PolicyVersion, OrderedSet[GroupId]],
    *,
    version: PolicyVersion,
    max_staleness: int,
    groups_per_batch: int,
    wanted: int,
) -> tuple[GroupId, ...]:
    """Return the groups of the next batch in ascending order; nothing while it must wait.

    Args:
        started: groups of which a sample is running or finished, by the version of the oldest token.
        complete: those of them that can be trained on.
        version: the trainer's.
        max_staleness: versions a token may lag behind when trained.
        groups_per_batch: of this and every later batch.
        wanted: of this batch; fewer than `groups_per_batch` only at the end of the run.
    """
    if not 0 < wanted <= sum(map(len, complete.values())):
        return ()
    chosen = _oldest(complete, wanted)
    must_take = _must_take(started, version=version, max_staleness=max_staleness, batch=groups_per_batch)
    if any(sum(v <= bound for v, _ in chosen) < min(must, wanted) for bound, must in must_take.items()):
        return ()
    return tuple(sorted(group_id for _, group_id in chosen))


def choose_part(
    started: Mapping[PolicyVersion, Collection[GroupId]],
    complete: Mapping[PolicyVersion, OrderedSet[GroupId]],
    *,
    version: PolicyVersion,
    max_staleness: int,
    groups_per_batch: int,
    left: int,
) -> tuple[GroupId, ...]:
    """Return the groups that may go into a batch before the rest of it is there, oldest first.

    Each takes a place, and those that are due in this batch and are not complete must find one later.

    Args:
        started: as for `choose_batch`, without what the batch has already.
        complete: those of them that can be trained on.
        version: the trainer's.
        max_staleness: versions a token may lag behind when trained.
        groups_per_batch: of this and every later batch.
        left: places of this batch that are free.
    """
    must_take = _must_take(started, version=version, max_staleness=max_staleness, batch=groups_per_batch)
    owed = {bound: min(must, left) for bound, must in must_take.items()}
    chosen: list[GroupId] = []
    for of_version, group_id in _oldest(complete, left):
        after = left - len(chosen) - 1
        if any(must > after for bound, must in owed.items() if bound < of_version):
            break
        chosen.append(group_id)
        owed = {bound: must - (bound >= of_version) for bound, must in owed.items()}
    return tuple(chosen)


def _oldest(
    complete: Mapping[PolicyVersion, OrderedSet[GroupId]], count: int
) -> list[tuple[PolicyVersion, GroupId]]:
    """Return the first `count` groups by version and id, whatever else there is."""
    found: list[tuple[PolicyVersion, GroupId]] = []
    for version in sorted(complete):
        found += [(version, group_id) for group_id in complete[version].smallest(count - len(found))]
    return found


def _must_take(
    started: Mapping[PolicyVersion, Collection[GroupId]], *, version: int, max_staleness: int, batch: int
) -> dict[PolicyVersion, int]:
    """Return for each version how many groups, that old or older, this batch has to take."""
    must, seen = {}, 0
    for bound in sorted(started):
        seen += len(started[bound])
        batches_left = max(0, bound + max_staleness - version)
        must[bound] = seen - batch * batches_left
    return must
