"""How an elastic child comes to have another number of replicas. Pure."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from relax_actor.supervision.commands import ReportKind
from relax_actor.supervision.desk import Desk
from relax_actor.supervision.family import BranchSlot
from relax_actor.supervision.leaf import Leaf
from relax_actor.supervision.spec import ChildSpec, Home, SpecError, SupervisorSpec, actor_names
from relax_actor.supervision.states import ChildState

if TYPE_CHECKING:
    from relax_actor.supervision.branch import Branch


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas a child has, and which of them come or go."""

    spec: ChildSpec | None  # as it is now; None where it is a supervisor
    count: int
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


def scale(branch: "Branch", slot: BranchSlot, replicas: int, desk: Desk) -> SupervisorSpec:
    """Have a running supervisor's child have so many replicas; return the supervisor's spec from now on.

    Raises:
        SpecError: it cannot have them, or has not yet those it was to have before; nothing is changed.
    """
    spec = _checked(branch, slot, replicas)
    if spec is None:
        return branch.spec
    names, before = actor_names(spec), len(slot.nodes)
    leaves = {leaf.name: leaf for leaf in slot.nodes if isinstance(leaf, Leaf)}
    for replica, name in enumerate(names):
        if name not in leaves:
            leaves[name] = Leaf(name, replica, spec, branch, desk, pool=slot.pool)
            leaves[name].is_joining = True
    for leaf in leaves.values():
        leaf.respec(spec)
    slot.spec, slot.nodes = spec, list(leaves.values())
    drain_s = spec.elastic.drain_s if spec.elastic is not None else 0.0
    branch.remove([leaf for leaf in leaves.values() if leaf.name not in names], drain_s=drain_s)
    desk.report(
        ReportKind.CHILD_SCALED,
        child=slot.id,
        replicas=replicas,
        before=before,
        starting=joining(slot),
        leaving=leaving(slot),
    )
    branch.wake()
    return _with_replicas(branch.spec, slot.id, replicas)


def joining(slot: BranchSlot) -> tuple[str, ...]:
    """Return the new replicas that are not ready yet."""
    return tuple(node.name for node in slot.nodes if node.is_joining and not node.was_ready)


def leaving(slot: BranchSlot) -> tuple[str, ...]:
    """Return the replicas that finish what they have."""
    return tuple(node.name for node in slot.nodes if node.is_leaving)


def check_room(spec: ChildSpec, replicas: int, taken: Collection[Home], joined: Collection[str]) -> None:
    """Check that there is a place for every new replica.

    Args:
        spec: of the child as it is.
        replicas: how many there are to be.
        taken: the places that actors have now.
        joined: the hosts that are there.

    Raises:
        SpecError: there is none, or its host is away.
    """
    hint = "a host with room, or more slots for one, has to be there when the run starts"
    if not spec.homes or replicas <= spec.replicas:
        return
    if replicas > len(spec.homes):
        raise SpecError(spec.id, f"has places for {len(spec.homes)} replicas, not for {replicas}", hint)
    for index in range(spec.replicas, replicas):
        home = spec.homes[index]
        if home.host not in joined:
            fact = f"has its place on {home.host}, which is away"
            raise SpecError(f"{spec.id}/{index}", fact, "wait until it is back: relax-actor status")
        if home.devices and home in taken:
            fact = f"has its place on {home.host}, {', '.join(home.devices)}, where another replica is"
            raise SpecError(f"{spec.id}/{index}", fact, "it makes room when its own host is back")


def _checked(branch: "Branch", slot: BranchSlot, replicas: int) -> ChildSpec | None:
    """Return a child's spec with so many replicas; None where it has them, or is on the way there.

    Raises:
        SpecError: it cannot have them, or has not yet those it was to have before.
    """
    spec = slot.spec
    if spec is None or spec.elastic is None:
        raise SpecError(slot.id, "has a fixed number of replicas", "only elastic children can be scaled")
    _check_bounds(spec, replicas)
    if branch.is_closing or branch.state is not ChildState.READY:
        state = "stopping" if branch.is_closing else branch.state.value
        raise SpecError(slot.id, f"cannot be scaled now: `{branch.name}` is {state}")
    if moving := (*joining(slot), *leaving(slot)):
        if replicas == spec.replicas:
            return None
        fact = f"is being scaled to {spec.replicas}: {', '.join(moving)}"
        raise SpecError(slot.id, fact, "one change at a time: wait until that is done")
    is_there = replicas == spec.replicas == len(slot.nodes)
    return None if is_there else msgspec.structs.replace(spec, replicas=replicas)


def _check_bounds(spec: ChildSpec, replicas: int) -> None:
    assert spec.elastic is not None  # noqa: S101 - the caller has looked
    least, most = spec.elastic.least, spec.elastic.most
    if replicas < least:
        raise SpecError(spec.id, f"cannot have {replicas} replicas, fewer than {least}")
    if most is not None and replicas > most:
        raise SpecError(spec.id, f"cannot have {replicas} replicas, more than {most}")


def _with_replicas(spec: SupervisorSpec, child: str, replicas: int) -> SupervisorSpec:
    """Return a supervisor's spec in which a child has so many replicas."""
    children = tuple(
        msgspec.structs.replace(each, replicas=replicas) if each.id == child else each
        for each in spec.children
    )
    return msgspec.structs.replace(spec, children=children)
