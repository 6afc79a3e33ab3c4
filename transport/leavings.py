"""Files and folders of other software that outlive who made them: written down, and removed later.

An actor whose children make such files writes down which they are, one line each, in a segment of its own
with the label `LABEL`. Whoever sweeps the actor's segments removes those files first (see `ShmSpace.sweep`).

Who has a file is told by its inode, too: a named semaphore is made under another name than the one it gets
(glibc's `sem_open` links it, and removes the first name), so its maker maps a file that is `(deleted)`.

Invariant: a file goes only if it is the one that was written down (its inode), belongs to this user, and no
living process that can be looked at has it open or mapped. A folder goes with all that is in it.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LABEL = "leavings"

_GONE = " (deleted)"


def write_down(path: Path, files: Iterable[Path]) -> None:
    """Add files and folders to a list; each line is whole, or is not counted.

    Args:
        path: of the list, which is made where there is none.
        files: absolute; those that are gone already are left out.

    Raises:
        OSError: there is no room.
    """
    lines = []
    for file in files:
        with suppress(FileNotFoundError):
            lines.append(f"{file.stat().st_ino} {file}\n")
    if lines:
        text = "".join(["\n", *lines]).encode()  # a line before that found no room ends here
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(descriptor, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(descriptor)


def listed(path: Path) -> list[tuple[int, Path]]:
    """Return inode and path of what a list names; there is nothing in one that is not there."""
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


def remove(path: Path) -> bool:
    """Remove what a list names; return whether nothing of it is left.

    A file that somebody still has stays, and makes the answer False; one that is not ours does not count.
    """
    ours = [file for inode, file in listed(path) if _is_ours(file, inode)]
    folders = [file for file in ours if file.is_dir()]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # who dies in this moment may still put something there
    files = set(ours) - set(folders)
    kept = held_by_anyone(files) if files else set()
    for file in files - kept:
        file.unlink(missing_ok=True)
    return not kept and not any(folder.exists() for folder in folders)


def held_by(pid: int, folder: Path) -> set[Path]:
    """Return the files directly in a folder that a process has open or mapped, by the names they have now."""
    found: set[Path] = set()
    inodes: set[int] = set()
    for inode, name in _held(pid, f"{folder}{os.sep}"):
        if name.endswith(_GONE):
            inodes.add(inode)
        elif (path := Path(name)).parent == folder:
            found.add(path)
    return found | _named(inodes, folder) if inodes else found


def held_by_anyone(files: Iterable[Path]) -> set[Path]:
    """Return which of some files of one folder a process has open or mapped."""
    wanted, held = set(files), set[Path]()
    folders = {file.parent for file in wanted}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            for folder in folders:
                held |= wanted & held_by(int(each.name), folder)
    return held


def _held(pid: int, start: str) -> list[tuple[int, str]]:
    """Return inode and name of what a process has open or mapped, of names that start so."""
    found: list[tuple[int, str]] = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if start in line:  # address, rights, offset, device, inode, name
                *_, inode, name = line.split(maxsplit=5)
                found.append((int(inode), name))
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                name = str(link.readlink())
                if name.startswith(start):
                    found.append((link.stat().st_ino, name))
    return found


def _named(inodes: set[int], folder: Path) -> set[Path]:
    """Return the files of a folder that have one of these inodes."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in inodes}
    return set()


def _is_ours(file: Path, inode: int) -> bool:
    with suppress(FileNotFoundError):
        found = file.lstat()
        return found.st_ino == inode and found.st_uid == os.getuid()
    return False
