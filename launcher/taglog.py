"""`relax-actor logs` and `launch --tag-output`: what actors write, each line with its actor before it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from launcher.errors import RunFolderError
from launcher.fields import nearest
from launcher.livelog import LiveLog
from launcher.runfolder import RunFolder
from launcher.tails import Tail, actor_of, log_files, source_of
from launcher.view import RunView
from launcher.wording import clean

POLL_S = 0.2
LIMIT_BYTES_PER_S = 256 * 1024.0
"""What a terminal is shown of each log; a person reads less, and a slow terminal must not hold up a run."""


def logs(
    folder: RunFolder,
    out: TextIO,
    *,
    actor: str = "",
    last: int = 20,
    follow: bool = False,
    limit_bytes_per_s: float | None = None,
) -> None:
    """Print the newest lines of actors' logs, each with its actor and incarnation before it.

    Args:
        folder: of the run.
        out: where to.
        actor: `rollout/3`, or a role for all its replicas; all actors if empty.
        last: lines a log.
        follow: go on until the run ends, new incarnations included; equal lines of replicas within a second
            are then shown once.
        limit_bytes_per_s: what each log may show while it is followed; None shows all.

    Raises:
        RunFolderError: no such actor has a log.
    """
    tails = {path: Tail(path, last) for path in log_files(folder.logs, actor)}
    if not tails and not follow:
        raise RunFolderError(f"`{folder.path}` has no log of `{actor or 'any actor'}`", _meant(folder, actor))
    for path, tail in tails.items():
        out.writelines(f"{source_of(path)} {bar(out)} {clean(line)}\n" for line in tail.lines())
    out.flush()
    if follow:
        _follow(RunView(folder), _Logs(folder, out, tails, actor, limit_bytes_per_s))


class TaggedLogs:
    """The live view of `launch --tag-output`, drawn by the launcher's own ticks.

    Args:
        folder: of the run; what its logs hold already is not shown.
        out: where to.
    """

    def __init__(self, folder: RunFolder, out: TextIO) -> None:
        tails = {path: Tail(path, None, path.stat().st_size) for path in log_files(folder.logs)}
        self._logs = _Logs(folder, out, tails, "", LIMIT_BYTES_PER_S)
        self._due = 0.0

    def tick(self) -> None:
        """Show what is new, at most every `POLL_S`."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + POLL_S
            self._logs.poll()

    def close(self) -> None:
        """Show everything that waits."""
        self._logs.poll()
        self._logs.close()


def bar(out: TextIO) -> str:
    """Return what stands between who said it and what it said, as the stream can show it."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return "│" if encoding.lower().replace("-", "") == "utf8" else "|"


def _follow(view: RunView, shown: "_Logs") -> None:
    is_running = True
    while is_running:
        view.refresh()
        is_running = view.is_running
        shown.poll()
        if is_running:
            time.sleep(POLL_S)
    shown.close()


class _Logs:
    """The logs that are there and those that come, through one `LiveLog`."""

    def __init__(
        self, folder: RunFolder, out: TextIO, tails: dict[Path, Tail], actor: str, limit: float | None
    ) -> None:
        self._folder, self._out, self._tails, self._actor = folder.logs, out, tails, actor
        self._live = LiveLog(bar=bar(out), limit_bytes_per_s=limit)

    def poll(self) -> None:
        """Take in what is new and show what is due."""
        now = time.monotonic()
        for path, line in self._new_lines():
            self._live.take(source_of(path), line, path, now)
        self._write(self._live.lines(now))

    def close(self) -> None:
        """Show what still waits for its like."""
        self._write(self._live.flush(time.monotonic()))

    def _new_lines(self) -> Iterator[tuple[Path, str]]:
        for path in log_files(self._folder, self._actor):
            tail = self._tails.setdefault(path, Tail(path, None))
            for line in tail.lines():
                yield path, line

    def _write(self, lines: list[str]) -> None:
        self._out.writelines(f"{line}\n" for line in lines)
        self._out.flush()


def _meant(folder: RunFolder, actor: str) -> str:
    names = list(dict.fromkeys(map(actor_of, log_files(folder.logs))))
    if not names:
        return "no actor has been started yet"
    close = nearest(actor, [*names, *(name.partition("/")[0] for name in names)])
    return f"did you mean {close}?" if close else f"there are {', '.join(names)}"
