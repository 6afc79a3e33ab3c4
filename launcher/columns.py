"""Plain tables: aligned columns of text, the same on a terminal and in a pipe."""

from collections.abc import Sequence


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[str] = frozenset()
) -> list[str]:
    """Return lines in which each column is as wide as its widest cell; the last column is not padded.

    Args:
        header: of each column.
        rows: as long as the header.
        right: headers of columns that are aligned to the right.
    """
    table = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(_cells(row, widths, header, right)).rstrip() for row in table]


def _cells(
    row: Sequence[str], widths: Sequence[int], header: Sequence[str], right: frozenset[str]
) -> list[str]:
    return [
        cell.rjust(width) if title in right else cell.ljust(width)
        for cell, width, title in zip(row, widths, header, strict=True)
    ]


def size(size_bytes: float) -> str:
    """Return a number of bytes in the largest unit that leaves at least one, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def duration(seconds: float) -> str:
    """Return a time span as a person says it: `0.02 s`, `14.2 s`, `3 min 5 s`, `2 h 14 min`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
