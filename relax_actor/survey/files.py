"""What a host can read and write: a canary on its disk, its memory, and digests of what a run reads."""

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from relax_actor.survey.records import PathFact

END_BYTES = 64 * 1024
"""A quick digest has so much of the beginning and of the end of each file; what differs, differs there."""

_PIECE_BYTES = 8 * 1024 * 1024


def nearest(path: str) -> Path:
    """Return a folder, or the nearest one above that is there."""
    folder = Path(path or ".").absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_bytes(path: str | Path) -> int:
    """Return how much a user may still write there.

    Raises:
        OSError: nobody can say.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def canary(folder: Path) -> tuple[float, str]:
    """Write a file, have it on disk, rename it; return how long the disk took in seconds, and what failed."""
    mark = secrets.token_hex(4)
    first, second = (folder / f".relax-actor-{mark}.{end}" for end in ("tmp", "new"))
    try:
        fd = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(4096))
            since = time.perf_counter()
            os.fsync(fd)
            took_s = time.perf_counter() - since
        finally:
            os.close(fd)
        first.rename(second)
        is_there = second.stat().st_size == len(bytes(4096))
    except OSError as error:
        return 0.0, f"{error.strerror}: {folder}"
    finally:
        for path in (first, second):
            with suppress(OSError):
                path.unlink()
    return took_s, "" if is_there else f"a file that was written is not whole: {folder}"


def sees(path: str, text: str) -> bool:
    """Whether a file is there with this text."""
    with suppress(OSError):
        return bool(path) and Path(path).read_text("utf-8", "replace") == text
    return False


def fact_of(path: str, *, is_full: bool) -> PathFact:
    """Return what there is at a path: a file, or a folder with all below it.

    Args:
        path: absolute, or from the working directory.
        is_full: digest every byte, not only the ends of each file.
    """
    digest, files, size_bytes = hashlib.blake2b(digest_size=8), 0, 0
    try:
        for name, file in _files(Path(path)):
            size = file.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            for piece in _pieces(file, size, is_full=is_full):
                digest.update(piece)
            files, size_bytes = files + 1, size_bytes + size
    except OSError as error:
        return PathFact(error=f"{error.strerror}: {error.filename or path}")
    if not files:
        return PathFact(error=f"the folder is empty: {path}")
    return PathFact(files=files, size_bytes=size_bytes, digest=digest.hexdigest())


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder, or the one file, each with its name there; hidden ones are left out."""
    if not stat.S_ISDIR(path.stat().st_mode):
        yield "", path
        return
    for name in sorted(os.listdir(path)):  # noqa: PTH208 - iterdir yields no names, and listdir raises alike
        if name.startswith("."):
            continue
        for below, file in _files(path / name):
            yield f"{name}/{below}" if below else name, file


def _pieces(file: Path, size: int, *, is_full: bool) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if is_full or size <= 2 * END_BYTES:
            while piece := stream.read(_PIECE_BYTES):
                yield piece
            return
        yield stream.read(END_BYTES)
        stream.seek(size - END_BYTES)
        yield stream.read(END_BYTES)
