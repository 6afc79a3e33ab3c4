"""Whether what is put fits the queue and itself. Pure."""

from collections.abc import Sequence

from relax_actor.row_queue.records import Columns, SharedPut
from relax_actor.row_queue.spec import QueueSpec


def check_columns(spec: QueueSpec, columns: Columns) -> int:
    """Check fields that rows have by themselves; return of how many rows they are.

    Raises:
        ValueError: an unknown field, a shared one, or columns of different lengths or of none.
    """
    unknown = [name for name in columns if name not in spec.fields]
    if unknown:
        raise ValueError(f"no field {unknown[0]!r}; there are {', '.join(spec.fields)}")
    shared = [name for name in columns if name in spec.shared]
    if shared:
        raise ValueError(f"{shared[0]!r} is shared by the rows of a group, and put by group")
    lengths = {len(column.lengths) for column in columns.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"columns of {sorted(lengths)} rows")
    return lengths.pop()


def check_shared(spec: QueueSpec, shared: SharedPut, keys: Sequence[int]) -> None:
    """Check fields that rows of groups have in common.

    Raises:
        ValueError: values of other groups than the rows', or a field that is not shared.
    """
    values = {len(column.lengths) for column in shared.columns.values()}
    if values != {len(shared.keys)} or not {*shared.keys} <= {*keys}:
        raise ValueError(f"shared fields of {len(shared.keys)} groups, {sorted(values)} values")
    alien = [name for name in shared.columns if name not in spec.shared]
    if alien:
        raise ValueError(f"{alien[0]!r} is not among the shared fields: {list(spec.shared)}")
