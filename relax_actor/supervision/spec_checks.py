"""Whether a supervision tree makes sense, looked at before anything of it starts."""

import math
import re

from relax_actor.supervision.spec import Backoff, ChildSpec, RestartType, SpecError, SupervisorSpec, ids

_ID = re.compile(r"[a-z][a-z0-9_-]*")
_ACTOR = re.compile(r".+:[A-Za-z_][\w.]*")
_AUTO_SHUTDOWN = ("never", "any", "all")


def validate(spec: SupervisorSpec) -> None:
    """Check a whole tree.

    Raises:
        SpecError: the first bad field, named by its path from the root, such as `run.children[2].replicas`.
    """
    check(spec, spec.id or "root", auto_shutdown="never")
    seen: set[str] = set()
    for each in ids(spec):
        if each in seen:
            raise SpecError(each, "names two children; an id is used once in a tree")
        seen.add(each)


def check(spec: ChildSpec | SupervisorSpec, path: str, *, auto_shutdown: str) -> None:
    """Check one spec and everything below it, duplicates apart.

    Args:
        spec: what is checked.
        path: how the error names it.
        auto_shutdown: its parent's; without one `significant` means nothing and is refused.

    Raises:
        SpecError: the first bad field.
    """
    _check_id(spec, path)
    _check_significant(spec, path, auto_shutdown)
    if isinstance(spec, ChildSpec):
        _check_child(spec, path)
    else:
        _check_supervisor(spec, path)


def _check_id(spec: ChildSpec | SupervisorSpec, path: str) -> None:
    if not _ID.fullmatch(spec.id):
        raise SpecError(
            f"{path}.id", f"is {spec.id!r}; it starts with a letter and has only a-z, 0-9, `_` and `-`"
        )


def _check_significant(spec: ChildSpec | SupervisorSpec, path: str, auto_shutdown: str) -> None:
    if not spec.significant:
        return
    if spec.restart is RestartType.PERMANENT:
        raise SpecError(
            f"{path}.significant",
            "contradicts restart `permanent`: what is always restarted never ends",
            "use `transient`",
        )
    if auto_shutdown == "never":
        raise SpecError(
            f"{path}.significant",
            "has no effect: its supervisor's auto_shutdown is `never`",
            "use auto_shutdown `any` or `all`",
        )


def _check_child(spec: ChildSpec, path: str) -> None:
    if isinstance(spec.actor, str) and not _ACTOR.fullmatch(spec.actor):
        raise SpecError(f"{path}.actor", f"is {spec.actor!r}; write `module:Class` or `file.py:Class`")
    if not -1000 <= spec.oom_score_adj <= 1000:
        raise SpecError(f"{path}.oom_score_adj", f"is {spec.oom_score_adj}; between -1000 and 1000")
    if spec.replicas < 1:
        raise SpecError(f"{path}.replicas", f"is {spec.replicas}; at least 1")
    _check_seconds(f"{path}.shutdown_s", spec.shutdown_s, zero=True)
    _check_seconds(f"{path}.start_timeout_s", spec.start_timeout_s, zero=False)
    if spec.backoff is not None:
        _check_backoff(spec.backoff, f"{path}.backoff")
    if spec.hang_after_s is not None:
        _check_seconds(f"{path}.hang_after_s", spec.hang_after_s, zero=False)
    _check_seconds(f"{path}.abort_grace_s", spec.abort_grace_s, zero=False)
    _check_spares(spec, path)
    _check_homes(spec, path)
    _check_elastic(spec, f"{path}.elastic")
    if spec.gang and spec.restart is RestartType.TEMPORARY:
        raise SpecError(f"{path}.gang", "contradicts restart `temporary`: a lost rank must come back")


def _check_homes(spec: ChildSpec, path: str) -> None:
    if not spec.homes:
        return
    if spec.hosts or spec.devices or spec.spares:
        raise SpecError(f"{path}.homes", "is instead of hosts, devices and spares, not beside them")
    if len(spec.homes) < spec.replicas:
        raise SpecError(f"{path}.homes", f"has {len(spec.homes)} places for {spec.replicas} replicas")


def _check_elastic(spec: ChildSpec, path: str) -> None:
    if spec.elastic is None:
        return
    if spec.gang or not spec.always_indexed:
        raise SpecError(path, "is for numbered replicas that are no ranks", "set always_indexed, and no gang")
    if not 1 <= spec.elastic.least <= spec.replicas <= (spec.elastic.most or spec.replicas):
        raise SpecError(f"{path}.least", f"and most have to be around replicas, which is {spec.replicas}")
    _check_seconds(f"{path}.drain_s", spec.elastic.drain_s, zero=True)


def _check_spares(spec: ChildSpec, path: str) -> None:
    if spec.spares < 0:
        raise SpecError(f"{path}.spares", f"is {spec.spares}; at least 0")
    if spec.spares and spec.devices and not spec.claims_devices:
        raise SpecError(f"{path}.spares", "needs a device of its own, which a spare has not")


def _check_supervisor(spec: SupervisorSpec, path: str) -> None:
    if spec.intensity.restarts < 0:
        raise SpecError(f"{path}.intensity.restarts", f"is {spec.intensity.restarts}; at least 0")
    _check_seconds(f"{path}.intensity.within_s", spec.intensity.within_s, zero=False)
    _check_backoff(spec.backoff, f"{path}.backoff")
    if spec.auto_shutdown not in _AUTO_SHUTDOWN:
        raise SpecError(f"{path}.auto_shutdown", f"is {spec.auto_shutdown!r}; `never`, `any` or `all`")
    for index, child in enumerate(spec.children):
        check(child, f"{path}.children[{index}]", auto_shutdown=spec.auto_shutdown)


def _check_backoff(backoff: Backoff, path: str) -> None:
    _check_seconds(f"{path}.base_s", backoff.base_s, zero=True)
    _check_seconds(f"{path}.cap_s", backoff.cap_s, zero=True)
    _check_seconds(f"{path}.reset_after_s", backoff.reset_after_s, zero=True)
    if not 0.0 <= backoff.jitter_frac <= 1.0:
        raise SpecError(f"{path}.jitter_frac", f"is {backoff.jitter_frac}; between 0 and 1")


def _check_seconds(path: str, seconds: float, *, zero: bool) -> None:
    if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not zero):
        raise SpecError(path, f"is {seconds}; finite seconds, {'0 or more' if zero else 'more than 0'}")
