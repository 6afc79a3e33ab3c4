"""The open files of this process."""

from contextlib import suppress
from pathlib import Path


def descriptors_below(folder: Path | str) -> list[str]:
    """Return the paths of a folder's files that this process has open, removed ones too.

    What else it has open is other tests' business, whose threads may still end.
    """
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the look itself
            found.append(str(each.readlink()))
    return [path for path in found if path.startswith(f"{folder}/")]
