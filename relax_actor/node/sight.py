"""What a node agent sees of one incarnation, for people on another host."""

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from relax_actor.actor.page import PageRecord
from relax_actor.actor.wire import Look
from relax_actor.files import log_tail
from relax_actor.node.dump import DUMPED_BY, dump_stacks, read_from, size_of
from relax_actor.node.facts import ProcessFacts, catches, look
from relax_actor.node.names import file_stem
from relax_actor.node.process import start_time
from relax_actor.stacks import is_dump_line

LOG_LINES = 50


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows of an incarnation."""

    pid: int = 0  # 0: it is dead, or was never here
    page: PageRecord | None = None
    run_dir: Path


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one incarnation; what there is not is empty."""

    facts: ProcessFacts | None = None  # of a live one
    page: PageRecord | None = None  # live, or as it was kept
    in_method_s: float | None = None  # how long it has been in its method, or had been when it ended
    takes_dumps: bool = False  # whether it has a handler that dumps its stacks
    dump: tuple[str, ...] = ()
    log: tuple[str, ...] = ()  # its last lines
    crash: tuple[str, ...] = ()  # files of its crash report, there
    has_traceback: bool = False


async def sight_of(wanted: Look, watched: Watched) -> Sight:
    """Look at an incarnation, and have it dump its stacks if that is wanted and it can."""
    stem = file_stem(wanted.name, wanted.incarnation)
    log, crash = (watched.run_dir / "logs" / f"{stem}.log", watched.run_dir / "crash" / stem)
    facts = look(watched.pid, start_time(watched.pid)) if watched.pid else None
    takes_dumps = facts is not None and not facts.is_stopped and catches(facts.pid, DUMPED_BY)
    dump = await _dump(watched.pid, log) if wanted.wants_stacks and takes_dumps else ()
    page = watched.page if facts else _kept(crash.with_name(f"{stem}.json"))
    traceback = crash.with_name(f"{stem}.txt")
    return Sight(
        facts=facts,
        page=page,
        in_method_s=time.monotonic() - page.method_since_s if page and page.method else None,
        takes_dumps=takes_dumps,
        dump=dump,
        log=tuple(line for line in log_tail(log) if not is_dump_line(line))[-LOG_LINES:],
        crash=tuple(str(path) for path in (crash, traceback) if path.exists()),
        has_traceback=traceback.exists(),
    )


async def _dump(pid: int, log: Path) -> tuple[str, ...]:
    before = size_of(log)
    await dump_stacks(pid, log)
    text = read_from(log, before).decode("utf-8", "backslashreplace")
    return tuple(line for line in text.splitlines() if is_dump_line(line))


def _kept(file: Path) -> PageRecord | None:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=PageRecord)
    return None
