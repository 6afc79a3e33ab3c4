"""Draws a run from its event log, and only from it: a live view, or one plain line an event.

The live view is redrawn on the caller's ticks, at most twice a second, without a thread of its own. A
display can never stop a run: what goes wrong in here switches the display off.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from launcher.runstate import ChildPhase, ChildState, RunState
from launcher.wording import clean, or_dash, plain_line, summary_lines
from relax_actor.telemetry import read_events

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.table import Table

REDRAW_S = 0.5
_STYLES = {
    ChildPhase.STARTING: "yellow",
    ChildPhase.READY: "cyan",
    ChildPhase.ACTIVE: "green",
    ChildPhase.EXITED: "red",
    ChildPhase.RESTARTING: "magenta",
}


class Display:
    """Shows a run that is going on.

    Args:
        events: the run's event log.
        stream: where to draw.
        offset: bytes of the log that belong to earlier launches.
        live: redraw in place; else one line an event.
        color: `auto`, `always` or `never`; of what is redrawn.
        monotonic: seconds, for the redraw rate.
    """

    def __init__(
        self,
        events: Path,
        stream: TextIO,
        *,
        offset: int = 0,
        live: bool,
        color: str = "auto",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = RunState()
        self._events, self._stream, self._offset = events, stream, offset
        self._monotonic, self._due = monotonic, 0.0
        self._live = _start_live(self.state, stream, color) if live else None
        self.broken: Exception | None = None

    def tick(self) -> bool:
        """Read new events and show them; never raises.

        Returns:
            False where that was done less than `REDRAW_S` ago, and nothing was done now.
        """
        if self._monotonic() < self._due:
            return False
        self._due = self._monotonic() + REDRAW_S
        if self.broken is None:
            self._guarded(self._show)
        return True

    def close(self) -> None:
        """Show the last events and leave the terminal as it was."""
        if self.broken is None:
            self._guarded(self._show)
        if self._live is not None:
            self._guarded(self._live.stop)

    def _show(self) -> None:
        events, self._offset = read_events(self._events, self._offset)
        for event in events:
            self.state.apply(event)
            line = plain_line(event)
            if self._live is None and line:
                self._stream.write(line + "\n")
        self._stream.flush()
        if self._live is not None:
            self._live.update(render(self.state), refresh=True)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a display can never stop a run
            self.broken = error


def render(state: RunState) -> "Group":
    """Draw everything, for rich."""
    from rich.console import Group  # noqa: PLC0415 - rich is not imported by --help
    from rich.text import Text  # noqa: PLC0415

    parts: list[RenderableType] = [Text(_headline(state), style="bold"), _tree(state)]
    parts += [Text(line) for line in summary_lines(state)]
    parts += [Text(f"· {clean(news)}", style="dim") for news in state.news]
    return Group(*parts)


def _start_live(state: RunState, stream: TextIO, color: str) -> "Live":
    from rich.console import Console  # noqa: PLC0415 - rich is not imported by --help
    from rich.live import Live  # noqa: PLC0415

    live = Live(
        render(state),
        console=Console(
            file=stream,
            no_color=None if color == "auto" else color == "never",
            force_terminal=True if color == "always" else None,
            color_system="standard" if color == "always" else "auto",
        ),
        auto_refresh=False,  # no thread: this process forks
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="visible",
    )
    live.start(refresh=True)
    return live


def _headline(state: RunState) -> str:
    parts = [f"run {state.run_id or '?'}", state.mode, f"max_staleness {state.max_staleness}"]
    parts.append(f"{max(0.0, state.seen_at - state.started_at):.0f} s")
    parts.append(f"{state.restarts} restarts")
    if state.ended is not None:
        parts.append(f"ended, exit code {state.ended.get('exit_code')}: {state.ended.get('reason')}")
    return clean("  ".join(part for part in parts if part))


def _tree(state: RunState) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - rich is not imported by --help
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("actor", "state", "incarnation", "policy", "pid", "last exit"):
        table.add_column(column)
    for child in sorted(state.children.values(), key=_by_name):
        phase = Text(child.phase, style=_STYLES[child.phase])
        numbers = (str(child.incarnation), or_dash(child.policy_version), str(child.pid or "-"))
        table.add_row(Text(clean(child.name)), phase, *numbers, Text(clean(child.reason)))
    return table


def _by_name(child: ChildState) -> tuple[str, int, str]:
    role, _, replica = child.name.partition("/")
    return (role, int(replica) if replica.isdecimal() else -1, child.name)
