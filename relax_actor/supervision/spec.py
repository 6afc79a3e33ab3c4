"""What a supervision tree is made of: plain data in Erlang's words; whether it makes sense: `spec_checks`.

A child spec says how one actor (or `replicas` equal ones) is started, stopped and restarted; a supervisor
spec says what its children owe one another. Source of the semantics: the Erlang/OTP `supervisor` manual.
"""

import random
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

from relax_actor.errors import ConfigError


class SpecError(ConfigError):
    """A supervision spec that cannot be run; `where` is the path of the bad field."""


class RestartType(StrEnum):
    """Whether a child that ended is started again."""

    PERMANENT = "permanent"  # always
    TRANSIENT = "transient"  # unless it ended normally or because it was told to
    TEMPORARY = "temporary"  # never


class Strategy(StrEnum):
    """Who is restarted with a child that failed."""

    ONE_FOR_ONE = "one_for_one"  # nobody else
    ONE_FOR_ALL = "one_for_all"  # all children
    REST_FOR_ONE = "rest_for_one"  # the children declared after it


class Intensity(msgspec.Struct, frozen=True, kw_only=True):
    """How many restarts a supervisor takes within a sliding window before it fails itself."""

    restarts: int = 3
    within_s: float = 600.0


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait before a restart: doubling from `base_s` to `cap_s`, less some jitter."""

    base_s: float = 0.2
    cap_s: float = 60.0
    reset_after_s: float = 300.0
    """A child that was ready for so long is restarted at once, and its failures count from 0 again."""
    jitter_frac: float = 0.5
    """The share of a delay that chance may take away, so that replicas do not restart in step."""

    def delay(self, consecutive_failures: int, rng: random.Random) -> float:
        """Return how long to wait before the next start.

        Args:
            consecutive_failures: failures in a row; 0 when it had been ready for `reset_after_s`.
            rng: where the jitter comes from.

        Returns:
            Seconds: 0 without failures, else within [(1 - jitter_frac) * d, d] where
            d = min(cap_s, base_s * 2 ** (consecutive_failures - 1)).
        """
        if consecutive_failures == 0:
            return 0.0
        doublings = min(consecutive_failures - 1, 64)  # beyond that every cap is reached, and floats overflow
        longest_s = min(self.cap_s, self.base_s * 2.0**doublings)
        return longest_s * (1.0 - self.jitter_frac * rng.random())


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """A place for one replica: a host, and what the replica has there for itself."""

    host: str
    devices: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    """Added to the child's, where the replica runs here."""


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """How far the number of a child's replicas may be changed while the tree runs."""

    least: int = 1
    most: int | None = None
    """None: as many as have a place."""
    drain_s: float = 0.0
    """How long a replica that leaves may go on finishing what it has; then it has `shutdown_s` to stop."""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one actor, or `replicas` equal ones that start and stop together, is run."""

    id: str
    actor: type | str
    """The actor class, or `module:Class` or `file.py:Class` where importing it here would cost too much."""
    args: dict[str, Any] = {}
    replicas: int = 1
    always_indexed: bool = False
    """Whether a single replica is named `id/0`; otherwise its name is the bare `id`."""
    restart: RestartType = RestartType.PERMANENT
    shutdown_s: float = 10.0
    """How long it may take to stop before it is killed; 0 kills at once."""
    start_timeout_s: float = 120.0
    """How long it may take to be ready before it is killed and counts as failed."""
    significant: bool = False
    """Whether its end can end its supervisor (see `SupervisorSpec.auto_shutdown`)."""
    devices: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    zygote: str = "default"
    """Which preloaded process forks it; none (an interpreter is started for it) if empty."""
    backoff: Backoff | None = None
    """Overrides the supervisor's."""
    python: str = ""
    """Path of an interpreter that has relax-actor installed, started for it instead of a fork of a zygote."""
    oom_score_adj: int = 0
    """How much sooner (to 1000) or later (to -1000, root only) the kernel takes it when memory ends."""
    hosts: tuple[str, ...] = ()
    """Where it may run: replicas take the hosts in turn, and the next one that is there when theirs is lost.

    Empty: on the first host of the tree."""
    spares: int = 0
    """How many processes wait, constructed but nameless, to take over at once where a replica dies."""
    claims_devices: bool = False
    """Whether each of its processes finds free ones of `devices` by itself, so that a spare may too."""
    hang_after_s: float | None = None
    """Kill it when it is busy and has finished nothing and reported no progress for so long."""
    gang: bool = False
    """Whether the replicas are ranks of collective groups: a death aborts the others' collectives."""
    abort_grace_s: float = 5.0
    """How long a surviving rank may take to leave an aborted collective before it is killed."""
    homes: tuple[Home, ...] = ()
    """Instead of `hosts` and `devices`: a place for each replica, in their order, and then the spare ones.

    A replica whose host is lost takes a spare place that nobody has, or shares one without devices; where
    there is none it waits for its host to come back."""
    elastic: Elastic | None = None
    """Within which bounds `scale` may change `replicas`; None: it may not."""


class SupervisorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Children in the order they start, and what follows when one of them fails."""

    id: str
    children: tuple["ChildSpec | SupervisorSpec", ...] = ()
    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: Intensity = Intensity()
    backoff: Backoff = Backoff()
    restart: RestartType = RestartType.PERMANENT
    """As a child of its parent; the root is never restarted."""
    significant: bool = False
    """As a child of its parent."""
    auto_shutdown: Literal["never", "any", "all"] = "never"
    """End normally once any, or all, of the significant children have ended normally."""


def actor_names(child: ChildSpec) -> tuple[str, ...]:
    """Return the names of a child's replicas: `id/0`, `id/1`, …, or the bare `id` of a single one."""
    if child.replicas == 1 and not child.always_indexed:
        return (child.id,)
    return tuple(f"{child.id}/{replica}" for replica in range(child.replicas))


def children_names(spec: SupervisorSpec) -> tuple[str, ...]:
    """Return the names of all actors below a supervisor, in the order they start."""
    return tuple(_walk_names(spec))


def ids(spec: ChildSpec | SupervisorSpec) -> tuple[str, ...]:
    """Return the ids of a spec and of everything below it, top down."""
    if isinstance(spec, ChildSpec):
        return (spec.id,)
    return (spec.id, *(below for child in spec.children for below in ids(child)))


def _walk_names(spec: SupervisorSpec) -> Iterator[str]:
    for child in spec.children:
        yield from actor_names(child) if isinstance(child, ChildSpec) else _walk_names(child)
