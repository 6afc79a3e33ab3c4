"""Who of a run's actors runs where: from a placement to the places in its tree's specs. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from relax_actor.config import Config
from relax_actor.devices import CPU
from relax_actor.placement import Placement, Seat
from relax_actor.supervision.spec import ChildSpec, Home, SpecError, SupervisorSpec, actor_names

ROLLOUT = "rollout"
PART = "part"
"""What a replica has on each of its further hosts; numbered through all replicas."""

NEEDED = ("queue", "dock", "prompts", "trainer")
"""The actors without which no run goes on, all on the first host, whose memory has the rows."""


class LoopHosts(msgspec.Struct, frozen=True, kw_only=True):
    """What the actors of the loop need to know of its hosts; the default is one host."""

    rows: str = ""  # the host whose memory has the rows: the queue's
    stores: Mapping[str, str] = {}  # of each host with policy versions, the store
    rollouts: Mapping[str, int] = {}  # how many replicas each host is to have

    def has_rows(self, host: str) -> bool:
        """Whether an actor on a host finds the rows in its own memory."""
        return self.rows in {"", host}

    def store(self, host: str) -> str:
        """Return the name of a host's store."""
        return self.stores.get(host, "store-0")

    def rollouts_on(self, host: str, replicas: int) -> int:
        """Return how many replicas share a host; `replicas` is how many there are."""
        return self.rollouts.get(host, 1) if self.rollouts else replicas


def parts_of(replica: int, hosts: int) -> tuple[str, ...]:
    """Return the names of the parts of a replica.

    Args:
        replica: which.
        hosts: over how many each is spread.
    """
    first = replica * (hosts - 1)
    return tuple(f"{PART}/{first + place}" for place in range(hosts - 1))


def members_of(replica: int, hosts: int) -> tuple[str, ...]:
    """Return the names of a replica's actors, in the order of their ranks; see `parts_of`."""
    return (f"{ROLLOUT}/{replica}", *parts_of(replica, hosts))


def is_part(actor: str) -> bool:
    """Whether an actor is the part of a replica on a further host."""
    return actor.startswith(f"{PART}/")


def spread(config: Config, hosts: Sequence[str]) -> Placement:
    """Place a run without devices: rollouts on the hosts in turn, everything else on the first one."""
    rollout = config.rollout
    names = [
        name for replica in range(rollout.replicas) for name in members_of(replica, rollout.hosts_per_replica)
    ]
    seats = (Seat(actor=name, host=hosts[place % len(hosts)]) for place, name in enumerate(names))
    return Placement(hosts=tuple(hosts), seats=(Seat(actor="trainer", host=hosts[0]), *seats))


def check_replicas(config: Config, placement: Placement | None) -> None:
    """Check that each replica is on as many hosts as it is spread over.

    Raises:
        UnplacedError: the placement says nothing of one of its parts.
        SpecError: some of them are on one host.
    """
    rollout = config.rollout
    if rollout.hosts_per_replica == 1:
        return
    if placement is None:
        raise SpecError("rollout.hosts_per_replica", f"is {rollout.hosts_per_replica}, and there is one host")
    for replica in range(rollout.replicas):
        names = members_of(replica, rollout.hosts_per_replica)
        hosts = [placement.seat(name).host for name in names]
        if len(set(hosts)) < len(hosts):
            raise SpecError(
                f"placement.{names[0]}", f"and its parts are on {', '.join(hosts)}: not all differ"
            )


def check(placement: Placement) -> None:
    """Check that what reads rows in place is where the rows are.

    Raises:
        SpecError: it is elsewhere.
    """
    for seat in placement.seats:
        if seat.actor in NEEDED and seat.host != placement.hosts[0]:
            raise SpecError(
                f"placement.{seat.actor}",
                f"is on {seat.host}; it runs on the first host, {placement.hosts[0]}, where the rows are",
            )


def loop_hosts(placement: Placement) -> LoopHosts:
    """Say of a run's hosts what its actors need to know."""
    seats = [seat for seat in placement.seats if _is_rollout(seat)]
    among = {placement.hosts[0], *(seat.host for seat in (*seats, *placement.spares))}
    hosts = [host for host in placement.hosts if host in among]
    return LoopHosts(
        rows=placement.hosts[0],
        stores={host: f"store-{index}" for index, host in enumerate(hosts)},
        rollouts=Counter(seat.host for seat in (*seats, *placement.spares)),
    )


def crosses_hosts(placement: Placement) -> bool:
    """Whether some actor is, or may be, on another host than the rows it works on."""
    works = (*(seat for seat in placement.seats if not is_part(seat.actor)), *placement.spares)
    return any(seat.host != placement.hosts[0] for seat in works)


def settled(spec: ChildSpec, placement: Placement) -> ChildSpec:
    """Return a child with its replicas' places; one that the placement says nothing of is on the first host.

    Raises:
        UnplacedError: it says where some of the replicas are, but not all, or nothing of a rollout.
    """
    names = actor_names(spec)
    known = {seat.actor for seat in placement.seats}
    if spec.id not in {ROLLOUT, PART} and not known.intersection(names):
        return msgspec.structs.replace(spec, homes=(Home(host=placement.hosts[0]),) * spec.replicas)
    seats = [placement.seat(name) for name in names]
    spares = _spares(spec.id, placement)
    return msgspec.structs.replace(spec, homes=tuple(map(_home, (*seats, *spares))), devices=())


def settled_tree(spec: SupervisorSpec, placement: Placement) -> SupervisorSpec:
    """Return a tree with everybody's places, but those that have one already; see `settled`.

    Raises:
        UnplacedError: as `settled`.
    """
    children = [
        settled_tree(child, placement)
        if isinstance(child, SupervisorSpec)
        else child
        if child.hosts
        else settled(child, placement)
        for child in spec.children
    ]
    return msgspec.structs.replace(spec, children=tuple(children))


def on_devices(config: Config, placement: Placement) -> Config:
    """Return a run's configuration with the devices that its placement gives, as the actors see them."""
    trainer = next((seat for seat in placement.seats if seat.actor == "trainer"), None)
    has_gpus = any(seat.gpus for seat in placement.seats if _is_rollout(seat))
    rollout = msgspec.structs.replace(config.rollout, device=_device(has_gpus=has_gpus))
    train = msgspec.structs.replace(config.train, device=_device(has_gpus=bool(trainer and trainer.gpus)))
    return msgspec.structs.replace(config, rollout=rollout, train=train)


def why_hopeless(config: Config, homeless: Mapping[str, str], rollouts: int | None = None) -> str:
    """Say why a run cannot go on without the hosts that are away, or nothing where it can.

    Args:
        config: the run's.
        homeless: the actors that wait for a host, and which and why.
        rollouts: how many replicas there are now; None: as many as configured.
    """
    rollouts = config.rollout.replicas if rollouts is None else rollouts
    homeless = _with_their_rollouts(homeless, config.rollout.hosts_per_replica)
    for name in NEEDED:
        if name in homeless:
            return f"{name} has no host: {homeless[name]}"
    return _too_few(ROLLOUT, rollouts, config.rollout.min_replicas, homeless) or _too_few(
        "reward", config.reward.replicas, 1, homeless
    )


def _too_few(role: str, replicas: int, least: int, homeless: Mapping[str, str]) -> str:
    away = [name for name in homeless if name.partition("/")[0] == role]
    left = replicas - len(away)
    if not away or left >= least:
        return ""
    return f"{left} of {replicas} {role} replicas have a host, fewer than {least}: {homeless[away[0]]}"


def _with_their_rollouts(homeless: Mapping[str, str], hosts: int) -> Mapping[str, str]:
    """Return who waits for a host, rollouts that wait for a part of theirs included."""
    parts = list(filter(is_part, homeless))
    waiting = {f"{ROLLOUT}/{int(part.partition('/')[2]) // (hosts - 1)}": homeless[part] for part in parts}
    return {**waiting, **homeless}


def _spares(role: str, placement: Placement) -> Sequence[Seat]:
    """Return the spare places of rollouts, or of parts: each has its share, by their numbers."""
    if role not in {ROLLOUT, PART}:
        return ()
    parts = sum(is_part(seat.actor) for seat in placement.seats)
    hosts = 1 + parts // max(1, sum(map(_is_rollout, placement.seats)))
    return [spare for n, spare in enumerate(placement.spares) if (n % hosts == 0) == (role == ROLLOUT)]


def _is_rollout(seat: Seat) -> bool:
    return seat.actor.partition("/")[0] == ROLLOUT


def _home(seat: Seat) -> Home:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(seat.gpus)} if seat.gpus else {}
    return Home(host=seat.host, devices=seat.gpus, env=env)


def _device(*, has_gpus: bool) -> str:
    """Return torch's name: an actor sees its own GPUs only, numbered from 0."""
    return "cuda:0" if has_gpus else CPU
