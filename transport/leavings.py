"""Files of other software in shared memory that outlive who made them: written down, and removed later.

An actor whose children make such files writes down which they are, one line each, in a segment of its own
with the label `LABEL`. Whoever sweeps the actor's segments removes those files first (see `ShmSpace.sweep`).

Invariant: a file goes only if it is the one that was written down (its inode), belongs to
this user, and no living process that can be looked at has it open or mapped.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LABEL = "leavings"


def write_down(path: Path, files: Iterable[Path]) -> None:
    """Add files to a list; each line is whole, or is not counted.

    Args:
        path: of the list, which is made where there is none.
        files: those that are gone already are left out.
    """
    lines = []
    for file in files:
        with suppress(FileNotFoundError):
            lines.append(f"{file.stat().st_ino} {file}\n")
    if lines:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, "".join(lines).encode())
        finally:
            os.close(descriptor)


def remove(path: Path) -> bool:
    """Remove the files that a list names; return whether none of them is left.

    A file that somebody still has stays, and makes the answer False; one that is not ours does not count.
    """
    files = [file for inode, file in _listed(path) if _is_ours(file, inode)]
    kept = held_by_anyone(files) if files else set()
    for file in files:
        if file not in kept:
            file.unlink(missing_ok=True)
    return not kept


def held_by(pid: int, folder: Path) -> set[Path]:
    """Return the files directly in a folder that a process has open or mapped, and that are still there."""
    found: set[str] = set()
    with suppress(OSError):
        found.update(line.split(maxsplit=5)[-1] for line in _maps(pid))
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found.add(str(link.readlink()))
    gone = " (deleted)"
    return {Path(name) for name in found if Path(name).parent == folder and not name.endswith(gone)}


def held_by_anyone(files: Iterable[Path]) -> set[Path]:
    """Return which of some files of one folder a process has open or mapped."""
    wanted, held = set(files), set[Path]()
    folders = {file.parent for file in wanted}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            for folder in folders:
                held |= wanted & held_by(int(each.name), folder)
    return held


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()


def _listed(path: Path) -> list[tuple[int, Path]]:
    try:
        lines = path.read_text(errors="replace").split("\n")[:-1]  # what follows the last is torn
    except FileNotFoundError:
        return []
    listed = []
    for line in lines:
        inode, _, name = line.partition(" ")
        if inode.isdecimal() and Path(name).is_absolute():
            listed.append((int(inode), Path(name)))
    return listed


def _is_ours(file: Path, inode: int) -> bool:
    with suppress(FileNotFoundError):
        found = file.lstat()
        return found.st_ino == inode and found.st_uid == os.getuid()
    return False
