"""Small files that are whole or not there, whatever dies meanwhile; and the ends of long ones."""

import os
from pathlib import Path

TAIL_BYTES = 256 * 1024
"""How much of a log is looked at: its end, however long it is."""


def replace_text(path: Path, text: str) -> None:
    """Write a file so that every reader sees all of the old text or all of the new.

    Args:
        path: with one writer at a time.
        text: the whole new content.
    """
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file so that every reader sees all of the old content or all of the new.

    Args:
        path: with one writer at a time.
        content: the whole new one.

    Raises:
        OSError: it could not be written; the old one is as it was.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def log_tail(path: Path, max_bytes: int = TAIL_BYTES) -> list[str]:
    """Return the last lines of a log, whole ones but for the first; a missing log has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read().decode("utf-8", "backslashreplace").splitlines()
    except OSError:
        return []
