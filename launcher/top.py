"""`relax-actor top`: the table of `ps` again and again, the busiest actor first."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from launcher.ps import CpuMeter, rows, table_lines
from launcher.view import RunView
from launcher.wording import clean

Show = Callable[[str], None]


def top(view: RunView, out: TextIO, *, interval_s: float = 2.0, looks: int | None = None) -> None:
    """Show what every actor does until the run ends; a terminal is redrawn in place.

    Args:
        view: of the run.
        out: where to.
        interval_s: seconds between two looks.
        looks: end after so many; None goes on.
    """
    meter, seen = CpuMeter(), 0
    with _screen(out) as show:
        while True:
            view.refresh()
            show(_text(view, meter))
            seen += 1
            if seen == looks or not view.is_running:
                return
            time.sleep(interval_s)


def _text(view: RunView, meter: CpuMeter) -> str:
    table = sorted(rows(view, meter), key=lambda row: -(row.cpu_frac or 0.0))
    return "\n".join([clean(view.head_line), _machine(), "", *table_lines(table)])


def _machine() -> str:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(facts[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"load {load} on {os.cpu_count()} cores   memory {total - available:.1f} of {total:.1f} GiB used"


@contextmanager
def _screen(out: TextIO) -> Iterator[Show]:
    if not out.isatty():
        yield lambda text: _print(out, text)
        return
    from rich.live import Live  # noqa: PLC0415 - rich is not imported by --help
    from rich.text import Text  # noqa: PLC0415

    with Live(auto_refresh=False, screen=True) as live:
        yield lambda text: live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def _print(out: TextIO, text: str) -> None:
    out.write(text + "\n\n")
    out.flush()
