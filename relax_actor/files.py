"""Small files that are whole or not there, whatever dies while they are written."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that every reader sees all of the old text or all of the new.

    Args:
        path: with one writer at a time.
        text: the whole new content.
    """
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
