"""Derives metrics.jsonl, and TensorBoard files on request, from the event log.

One writer, one row an event, in the order of the log. A row names its axis and its own step, so that an
evaluation or a step that arrives late is kept where it belongs instead of being dropped as non-monotonic.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.runstate import number
from relax_actor.telemetry import Event, read_events

Row = dict[str, Any]
Sink = Callable[[Row], None]
_HEADER = frozenset({"t", "m", "actor", "inc", "pid", "kind"})


class MetricsWriter:
    """Follows an event log from its beginning and writes it anew as metrics.

    Args:
        events: the event log.
        path: metrics.jsonl; replaced.
        tensorboard: a folder for TensorBoard files, or nothing.
    """

    def __init__(self, events: Path, path: Path, *, tensorboard: Path | None = None) -> None:
        self._events, self._path, self._offset = events, path, 0
        self._started_at = 0.0
        self._sink = _tensorboard_sink(tensorboard) if tensorboard else None
        path.write_bytes(b"")

    def poll(self) -> None:
        """Write the rows of new events; a full disk or a broken TensorBoard never raises."""
        with suppress(OSError):
            events, offset = read_events(self._events, self._offset)
            rows = list(self._rows(events))
            with self._path.open("a", encoding="ascii") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            self._offset = offset
            self._forward(rows)

    def _rows(self, events: list[Event]) -> Iterator[Row]:
        for event in events:
            if event.get("kind") == "run_started" and not self._started_at:
                self._started_at = number(event.get("t"))
            row = metrics_row(event, started_at=self._started_at)
            if row:
                yield row

    def _forward(self, rows: list[Row]) -> None:
        if self._sink is None:
            return
        try:
            for row in rows:
                self._sink(row)
        except Exception:  # noqa: BLE001 - TensorBoard can never stop a run
            self._sink = None


def metrics_row(event: Event, *, started_at: float) -> Row | None:
    """Return the metrics row of a `step` or `eval` event, None for any other.

    Args:
        event: from the event log.
        started_at: unix seconds at which the run was first started.

    Returns:
        `axis` ("train" or "eval/SET"), `step`, `wall_s` since the start, and the event's own fields.
    """
    axes = {"step": "train", "eval": f"eval/{event.get('eval_set') or 'eval'}"}
    axis = axes.get(str(event.get("kind")))
    if axis is None:
        return None
    head = {"axis": axis, "step": event.get("step"), "wall_s": round(number(event.get("t")) - started_at, 3)}
    return head | {name: value for name, value in event.items() if name not in _HEADER and name not in head}


def _tensorboard_sink(folder: Path) -> Sink | None:
    try:
        summary = importlib.import_module("tensorboard.summary")  # optional and slow to import
    except ImportError:
        return None
    writer = summary.Writer(str(folder))

    def write(row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
                writer.add_scalar(f"{row['axis']}/{name}", value, int(row["step"]))
        writer.flush()

    return write
