"""What the rows of a group have in common, such as the images of a prompt: stored once. Pure.

It is put with the first rows of a group, or before them, and goes with its last row: when as many rows of the
group were put as it has, or no further rows come, and none of them is left.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from relax_actor.row_queue.records import Columns, SharedPut


@dataclass(slots=True)
class Common:
    """The rows of a group, as far as they have something in common."""

    columns: Columns = field(default_factory=dict)  # of one value each
    first: int = 0  # row
    rows: int = 0  # that the group has
    put: int = 0
    here: int = 0


class Shared:
    """By group, what its rows have in common."""

    def __init__(self) -> None:
        self._groups: dict[int, Common] = {}
        self._is_ended = False

    def lacking(self, keys: Iterable[int]) -> list[int]:
        """Return the groups of which nothing is here.

        Raises:
            ValueError: one of them has rows, which were put without it.
        """
        found = [key for key in keys if key not in self._groups or not self._groups[key].columns]
        for key in found:
            if key in self._groups:
                raise ValueError(f"group {key} has rows that were put without its shared fields")
        return found

    def add(self, event: SharedPut) -> Iterator[str]:
        """Take what groups have in common; yield the segment for each of them."""
        for index, key in enumerate(event.keys):
            columns = {name: column.part(index, index + 1) for name, column in event.columns.items()}
            put = event.gone[index] if event.gone else 0
            self._groups[key] = Common(columns=columns, put=put)
            yield next(iter(columns.values())).segment

    def came(self, first: int, keys: Sequence[int], group_rows: int) -> Iterator[Columns]:
        """Count rows from `first` on; yield for each what it has by its group."""
        for row, key in enumerate(keys, first):
            common = self._groups.setdefault(key, Common())
            if not common.here:
                common.first = row
            common.rows, common.put, common.here = group_rows, common.put + 1, common.here + 1
            yield common.columns

    def went(self, keys: Sequence[int]) -> Iterator[str]:
        """Count rows that are done with; yield the segments of groups of which that was the last."""
        for key in keys:
            self._groups[key].here -= 1
        for key in dict.fromkeys(keys):
            yield from self._let_go(key)

    def end(self) -> Iterator[str]:
        """Expect no further rows; yield the segments of groups that waited for some."""
        self._is_ended = True
        for key in [*self._groups]:
            yield from self._let_go(key)

    def columns(self, key: int) -> Columns:
        """Return what the rows of a group have in common."""
        return self._groups[key].columns

    def holdings(self) -> Iterator[tuple[int, Columns]]:
        """Yield what is here, and the first row that it is for."""
        for common in self._groups.values():
            yield common.first, common.columns

    def events(self) -> Iterator[SharedPut]:
        """Yield what makes this anew, before the rows are put."""
        for key, common in self._groups.items():
            if common.columns:
                yield SharedPut((key,), common.columns, (common.put - common.here,))

    def _let_go(self, key: int) -> Iterator[str]:
        common = self._groups[key]
        if not common.here and (self._is_ended or common.put >= common.rows > 0):
            del self._groups[key]
            if common.columns:
                yield next(iter(common.columns.values())).segment
