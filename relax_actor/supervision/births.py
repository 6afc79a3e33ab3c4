"""How an actor is ordered from a node agent: what it is called, where it binds, where its files go."""

import contextlib
import inspect
import sys
from pathlib import Path

from relax_actor.actor import wire
from relax_actor.node.names import file_stem
from relax_actor.supervision.host import actor_address
from relax_actor.supervision.site import Key, Place
from relax_actor.supervision.spec import ChildSpec, Home


def spawn_record(key: Key, spec: ChildSpec, home: Home, site: Place, *, is_spare: bool) -> wire.Spawn:
    """Return the order to start one incarnation on a host."""
    name, incarnation = key
    file = file_stem(name, incarnation)
    return wire.Spawn(
        name=name,
        incarnation=incarnation,
        target=target_of(spec.actor),
        zygote=spec.zygote,
        address=str(actor_address(site.socket_dir, name, incarnation)),
        log=f"{site.run_dir}/logs/{file}.log",
        crash=f"{site.run_dir}/crash/{file}.txt",
        env={**spec.env, **home.env},
        python=spec.python,
        oom_score_adj=spec.oom_score_adj,
        devices=home.devices,
        is_spare=is_spare,
        hang_after_s=spec.hang_after_s,
        is_rank=spec.gang,
    )


def target_of(actor: type | str) -> str:
    """Name an actor class so that another process finds it: `module:Class`, or `path.py:Class`.

    Raises:
        TypeError: a class made inside a function, which no other process can find.
    """
    if isinstance(actor, str):
        return actor
    if "<locals>" in actor.__qualname__:
        raise TypeError(f"{actor.__qualname__} is defined inside a function; move it to its module")
    if actor.__module__ in {"__main__", "__relax_main__"}:
        return f"{Path(inspect.getfile(sys.modules[actor.__module__])).resolve()}:{actor.__qualname__}"
    return f"{actor.__module__}:{actor.__qualname__}"


def rename_files(old: Path, new: Path, suffixes: tuple[str, ...]) -> None:
    """Let what a spare wrote be found under its new name, and under the old one; it may write on."""
    for suffix in suffixes:
        source, target = (path.with_name(f"{path.name.removesuffix(suffix)}{suffix}") for path in (old, new))
        with contextlib.suppress(OSError):
            source.rename(target)
            source.symlink_to(target.name)
