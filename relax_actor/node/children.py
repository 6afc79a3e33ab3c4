"""The actors of this host, from their first moment to the last trace of them.

A death is told twice: `Dying` at once, by the robust mutex in the actor's status page, and `Exited` when the
kernel says (pidfd) that the process is gone and nothing of it is left: no member of its process group or
control group, no stray that bears its mark, no segment, no memory of its devices.
"""

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from relax_actor import last_words
from relax_actor.actor import page
from relax_actor.actor.page import PageState
from relax_actor.actor.wire import Dying, Exited, Hung, Look, NodeConfig, Promote, Record, Seen, Spawn
from relax_actor.node import cgroup, process, strays
from relax_actor.node.devices import RELEASE_DEADLINE_S, DeviceGate, await_release
from relax_actor.node.dump import dump_stacks
from relax_actor.node.early import EarlyWord
from relax_actor.node.hangs import HangWatch
from relax_actor.node.sight import Watched, sight_of
from relax_actor.node.watch import DeathWatch
from transport.segment import Segment, SegmentError
from transport.shm import ShmSpace

POLL_S = 0.002
GROUP_DEADLINE_S = 30.0
ENDING = "it is ending"
"""Of an actor whose process does not say why."""


class _Child(msgspec.Struct, eq=False):
    spawn: Spawn
    pid: int
    pidfd: int
    segment: Segment
    watch: DeathWatch
    is_dying: bool = False
    is_killed: bool = False  # by us
    dead_since_s: float = 0.0
    code: int | None = None
    signal: int | None = None
    was_ready: bool = False
    oom: str = ""
    is_in_cgroup: bool = False
    promoted_to: tuple[str, int] | None = None  # who it is now, if it was started as a spare

    @property
    def key(self) -> tuple[str, int]:
        return self.spawn.name, self.spawn.incarnation

    def page(self) -> page.PageRecord | None:
        return page.read(bytes(self.segment.buf), lambda: bytes(self.segment.buf))


class Children:
    """Watches actors, kills them, and tells of their ends. Every method runs in the agent's loop thread.

    Args:
        config: what all processes of the run have in common.
        space: the run's shared memory.
        others: pids of the agent's children that are no actors.
        say: sends a record to the head.
    """

    def __init__(
        self,
        config: NodeConfig,
        space: ShmSpace,
        others: Callable[[], set[int]],
        say: Callable[[Record], object],
    ) -> None:
        self._run_id, self._space, self._others, self._say = config.run_id, space, others, say
        self._early, self._is_remote = EarlyWord(config.early), config.is_remote
        self._children: dict[tuple[str, int], _Child] = {}
        self._cgroups = cgroup.Cgroups(cgroup.root(config.run_id, os.getpid()))
        self._oom = cgroup.OomWatch()
        self._gate: DeviceGate | None = None
        self._held_until_s = math.inf
        self._unborn: dict[tuple[str, int], Segment] = {}  # pages of those who are not forked yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._hangs = HangWatch(self._loop, self._hung)
        self._look_at_oom()

    # -- birth ----------------------------------------------------------------------------------

    def prepare(self, spawn: Spawn) -> tuple[Spawn, Segment | None, str]:
        """Make what an actor finds when it starts: its control group and its status page, or an error."""
        spawn = msgspec.structs.replace(spawn, cgroup=self._cgroups.make(spawn.name, spawn.incarnation))
        try:
            segment = page.create(self._space, spawn.name, spawn.incarnation)
        except SegmentError as error:
            return spawn, None, str(error)
        page.hold_until(segment, self._held_until_s)
        self._unborn[spawn.name, spawn.incarnation] = segment
        return spawn, segment, ""

    def refuse(self, spawn: Spawn, error: str) -> None:
        """Take back what was prepared for an actor that could not be started, and say why."""
        self._unborn.pop((spawn.name, spawn.incarnation), None)
        self._cgroups.end(spawn.name, spawn.incarnation)
        self._space.sweep(spawn.name, spawn.incarnation)
        self._say(Exited(name=spawn.name, incarnation=spawn.incarnation, error=error))

    def add(self, spawn: Spawn, pid: int, segment: Segment) -> str:
        """Watch an actor that was started; return why it cannot be, or nothing."""
        key = spawn.name, spawn.incarnation
        self._unborn.pop(key, None)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # dead, and reaped with a dead actor's strays
            return _crash_text(spawn.crash) or "it ended as soon as it was born"
        child = self._children[key] = _Child(spawn, pid, pidfd, segment, DeathWatch(segment))
        child.watch.start(lambda: self._felt(child))
        self._loop.add_reader(child.pidfd, self._died, child)
        self._hangs.watch(key, segment, spawn.hang_after_s)
        return ""

    def hold_until(self, until_s: float) -> None:
        """Tell all actors, also those that come later, until when the lease holds; CLOCK_BOOTTIME."""
        self._held_until_s = until_s
        for segment in (*self._unborn.values(), *(child.segment for child in self._children.values())):
            page.hold_until(segment, until_s)

    def promote(self, promote: Promote) -> None:
        """Note who a spare is from now on. Its end is told under its old name, which the head remembers."""
        child = self._children.get((promote.spare, 1))
        if child is not None:  # else it died just now, and the head has been told
            child.promoted_to = promote.name, promote.incarnation

    def look(self, look: Look, run_dir: Path) -> None:
        """Tell the head what there is to see of an actor, also of one that is dead."""
        child = self._child(look.name, look.incarnation)
        pid, seen = (child.pid, child.page()) if child is not None else (0, None)
        self._run(self._look(look, Watched(pid=pid, page=seen, run_dir=run_dir)))

    async def _look(self, look: Look, watched: Watched) -> None:
        self._say(Seen(id=look.id, sight=msgspec.json.encode(await sight_of(look, watched))))

    def _hung(self, key: tuple[str, int], why: str) -> None:
        """Tell the head who hangs; it decides what follows."""
        name, incarnation = self._children[key].promoted_to or key
        self._say(Hung(name=name, incarnation=incarnation, why=why))

    # -- forced ends ----------------------------------------------------------------------------

    def kill(self, name: str, incarnation: int) -> None:
        """Kill an actor and its group; a live one writes its stacks first, unless it is killed twice."""
        child = self._child(name, incarnation)
        if child is None:
            return
        is_dump_due = not child.is_killed and not child.is_dying and self._can_dump(child)
        child.is_killed = True
        self._hangs.forget(child.key)
        if is_dump_due:
            self._run(self._dump_and_kill(child))
        else:
            process.kill_group(child.pid)

    def _child(self, name: str, incarnation: int) -> _Child | None:
        key = name, incarnation
        promoted = (child for child in self._children.values() if child.promoted_to == key)
        return self._children.get(key) or next(promoted, None)

    async def end(self) -> None:
        """Kill every actor, wait until nothing of them is left, and remove the run's control groups."""
        for child in self._children.values():
            child.is_killed = True
            process.kill_group(child.pid)
        deadline_s = time.monotonic() + GROUP_DEADLINE_S
        while self._children and time.monotonic() < deadline_s:  # noqa: ASYNC110 - emptied by _sweep's timers
            await asyncio.sleep(POLL_S)
        self._cgroups.close()

    def _can_dump(self, child: _Child) -> bool:
        """Whether it has come so far that SIGUSR1 means a dump to it, and not death."""
        seen = child.page()
        return seen is not None and seen.state != PageState.UNBORN.name

    async def _dump_and_kill(self, child: _Child) -> None:
        await dump_stacks(child.pid, Path(child.spawn.log))
        if not child.dead_since_s:
            process.kill_group(child.pid)

    def _run(self, task: Coroutine[Any, Any, None]) -> None:
        running = self._loop.create_task(task)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    # -- deaths ---------------------------------------------------------------------------------

    def _felt(self, child: _Child) -> None:
        """Say at once what the loop will say in its turn; the watch's thread."""
        notice = _notice(child)
        if notice.reason == ENDING and child.is_dying:  # it was reaped meanwhile: the loop has said why
            return
        self._early.say(notice)
        self._loop.call_soon_threadsafe(self._dying, child, notice)

    def _dying(self, child: _Child, notice: Dying) -> None:
        """Tell the head, once, that an actor takes no more calls, and what its page says of them."""
        if not child.is_dying:
            child.is_dying = True
            if notice.reason == signal.SIGKILL.name and not child.is_killed:
                child.oom = self._oom.evidence()  # now: giving back its memory may take long
            self._hangs.forget(child.key)
            self._say(notice)

    def _died(self, child: _Child) -> None:
        self._loop.remove_reader(child.pidfd)
        os.close(child.pidfd)
        child.watch.end()
        self._dying(child, _notice(child))
        child.dead_since_s = time.monotonic()
        self._settle(child)

    def _settle(self, child: _Child) -> None:
        """Note how it ended, as soon as it is ours: who dies at birth is still the child of who forked it."""
        is_late = time.monotonic() - child.dead_since_s > GROUP_DEADLINE_S
        if process.awaits_adoption(child.pid) and not is_late:
            self._loop.call_later(POLL_S, self._settle, child)
            return
        child.code, child.signal = process.exit_of(child.pid) or (None, None)
        child.was_ready = _was_ready(child)
        child.oom = self._oom_evidence(child)
        child.is_in_cgroup = cgroup.is_in(child.pid, child.spawn.cgroup)
        if child.code != 0:
            self._keep_page(child)
        self._sweep(child)

    def _oom_evidence(self, child: _Child) -> str:
        if child.signal != signal.SIGKILL or child.is_killed:
            return ""
        return self._cgroups.oom_evidence(*child.key) or child.oom or self._oom.evidence()

    def _look_at_oom(self) -> None:
        self._oom.look()
        self._loop.call_later(cgroup.OOM_LOOK_S, self._look_at_oom)

    def _keep_page(self, child: _Child) -> None:
        record = child.page()
        if record is not None:
            with suppress(OSError):
                Path(child.spawn.crash).with_suffix(".json").write_bytes(msgspec.json.encode(record))

    def _sweep(self, child: _Child) -> None:
        """Kill what the dead actor left; go on only when nothing of it is left."""
        is_late = time.monotonic() - child.dead_since_s > GROUP_DEADLINE_S
        if self._is_anything_left(child) and not is_late:
            self._loop.call_later(POLL_S, self._sweep, child)
            return
        error = f"its process group {child.pid} did not end in {GROUP_DEADLINE_S:g} s" if is_late else ""
        if child.spawn.devices:
            self._run(self._release(child, error))
        else:
            self._gone(child, error)

    def _is_anything_left(self, child: _Child) -> bool:
        process.kill_group(child.pid)  # before the leader is reaped: its group id is still ours
        process.reap_group(child.pid)
        if not self._cgroups.end(*child.key) or process.kill_group(child.pid):
            return True
        known = {each.pid for each in self._children.values()} | self._others()
        if child.is_in_cgroup:  # and so were its strays
            process.reap_strangers(known)
            return False
        page_name = self._space.name(*child.key, page.LABEL)
        return bool(strays.kill_strays(self._mark(child), page_name, known))

    async def _release(self, child: _Child, error: str) -> None:
        """Wait until the memory of the dead actor's devices is back."""
        if self._gate is None:
            self._gate = await asyncio.to_thread(DeviceGate.of_this_host)
        mark = self._mark(child)
        held = await await_release(
            self._gate,
            child.spawn.devices,
            lambda pid: pid == child.pid or strays.bears_mark(pid, mark),
            RELEASE_DEADLINE_S,
        )
        self._gone(child, error, held)

    def _gone(self, child: _Child, error: str, held: str = "") -> None:
        self._space.sweep(*child.key)
        if child.promoted_to is not None:
            self._space.sweep(*child.promoted_to)
        del self._children[child.key]
        name, incarnation = child.key
        exited = Exited(
            name=name,
            incarnation=incarnation,
            code=child.code,
            signal=child.signal,
            error=error or _crash_text(child.spawn.crash),
            oom=child.oom,
            held=held,
            was_ready=child.was_ready,
        )
        if self._is_remote and child.code != 0:  # the head does not see its files yet
            doing = last_words.doing(Path(child.spawn.crash).with_suffix(".json"))
            last = last_words.last_line(Path(child.spawn.log))
            exited = msgspec.structs.replace(exited, doing=doing, last=last)
        self._say(exited)

    def _mark(self, child: _Child) -> str:
        return strays.mark_of(self._run_id, *child.key)


def _notice(child: _Child) -> Dying:
    reason = process.ending_of(child.pid) or ENDING
    return page.dying(*(child.promoted_to or child.key), reason, child.page())


def _was_ready(child: _Child) -> bool:
    seen = child.page()
    return seen is not None and seen.state in {PageState.READY.name, PageState.STOPPING.name}


def _crash_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="backslashreplace")
    except OSError:
        return ""
