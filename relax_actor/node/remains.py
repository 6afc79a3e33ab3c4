"""What a run leaves on its host when all of it was killed at one moment; the next start clears it away.

A run's head and keepers hold a shared lock on a file in their socket folder, which says where the run's
segments and control groups are. The kernel lets go of a lock when the last who holds it is dead: a file that
can be locked alone is a dead run's. Nothing is judged by its age, and nothing of another user is touched.

Invariant: who waits for a lock looks, once it has it, whether the file is still the one of that name, and
otherwise begins anew; so a run that starts under the id of one that is being cleared away loses nothing.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from relax_actor.node import cgroup, strays
from relax_actor.node.names import make_socket_dir
from transport.shm import ShmSpace

FILE = "alive"
CLOSE_DEADLINE_S = 2.0
_POLL_S = 0.002


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says of its run."""

    run_id: str
    shm_root: str
    cgroups: str = ""  # the folder in which the run's control groups are; empty where there are none


def claim(name: str, run_id: str, shm_root: str) -> tuple[Path, int]:
    """Make a socket folder of a run that lives, or join those who have it; clear away those of the dead.

    Args:
        name: of the folder.
        run_id: whose.
        shm_root: where the run's segments are.

    Returns:
        The folder, and a descriptor that holds the claim until this process ends or closes it.

    Raises:
        PermissionError: the folder belongs to another user.
    """
    groups = cgroup.root(run_id, 0)
    says = Claim(run_id=run_id, shm_root=shm_root, cgroups=str(groups.parent) if groups else "")
    clear_dead(make_socket_dir(name).parent)
    while True:
        folder = make_socket_dir(name)
        with suppress(FileNotFoundError):  # cleared away meanwhile
            descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_still(descriptor, folder):
                os.pwrite(descriptor, msgspec.json.encode(says), 0)
                return folder, descriptor
            os.close(descriptor)


def clear_dead(base: Path) -> list[str]:
    """End what dead runs left: orphans, segments, control groups, socket folders; return the runs' ids.

    Args:
        base: this user's folder of socket folders.
    """
    by_run: dict[str, list[Path]] = {}
    for folder in sorted(base.iterdir()):
        if (said := _read(folder)) is not None:
            by_run.setdefault(said.run_id, []).append(folder)
    return [run_id for run_id, folders in by_run.items() if _clear(folders)]


def _clear(folders: list[Path]) -> bool:
    with ExitStack() as locks:
        if not all(locks.enter_context(_alone(folder)) for folder in folders):
            return False
        for said in filter(None, map(_read, folders)):
            strays.kill_orphans(said.run_id)
            _close_groups(said)
            _sweep(ShmSpace(said.run_id, said.shm_root))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return True


def _sweep(space: ShmSpace) -> None:
    """Remove a dead run's segments; what an orphan has open that was just killed goes a moment later."""
    deadline_s = time.monotonic() + CLOSE_DEADLINE_S
    space.sweep()
    while space.names() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        space.sweep()


def _close_groups(said: Claim) -> None:
    """End a dead run's control groups; what is killed needs a moment to be gone."""
    parent = Path(said.cgroups) if said.cgroups else None
    groups = cgroup.Cgroups(cgroup.folder_of(parent, said.run_id, 0) if parent else None)
    deadline_s = time.monotonic() + CLOSE_DEADLINE_S
    while not groups.close() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock alone; yield whether that could be had."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor) and _is_still(descriptor, folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(descriptor: int, folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), (folder / FILE).stat())
    return False


def _read(folder: Path) -> Claim | None:
    """Return what a folder's file says; None where there is none, or where it is just being made."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Claim)
    return None
