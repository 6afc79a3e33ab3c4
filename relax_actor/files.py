"""Small files that are whole or not there, whatever dies while they are written."""

import os
from pathlib import Path


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
