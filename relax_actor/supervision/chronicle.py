"""What is written down of a tree: its events, death lines, crash folders, and where the files are."""

import os
from pathlib import Path
from typing import Any

from relax_actor.actor import wire
from relax_actor.actor.wire import NodeConfig
from relax_actor.node import process
from relax_actor.node.names import file_stem
from relax_actor.supervision.births import rename_files
from relax_actor.supervision.crash import CrashGatherer, Death
from relax_actor.supervision.events import Exit
from relax_actor.supervision.fleet import Fleet
from relax_actor.supervision.site import Key
from relax_actor.supervision.status import NodeStatus
from relax_actor.telemetry import EventLog


class Chronicle:
    """Writes a tree's history.

    Args:
        config: names the run and its folder.
        fleet: knows where an actor is.
        log: takes the events.
    """

    def __init__(self, config: NodeConfig, fleet: Fleet, log: EventLog) -> None:
        self._config, self._fleet, self._log = config, fleet, log
        self._crashes = CrashGatherer()

    def tree(self, kind: str, root: NodeStatus) -> None:
        """Log what people need to look into the run while this process is hung."""
        self._log.emit(
            kind,
            run_id=self._config.run_id,
            host=os.uname().nodename,
            start_ticks=process.start_time(os.getpid()),
            shm_root=self._config.shm_root,
            address=self._config.head,
            tree=_outline(root),
        )

    def spawned(self, born: wire.Spawned) -> None:
        """Log that a process exists."""
        place = self._fleet.whereabouts((born.name, born.incarnation))
        folder = Path(place.pop("run_dir", self._config.run_dir))
        self._log.emit(
            "child_spawned",
            child=born.name,
            incarnation=born.incarnation,
            pid=born.pid,
            start_ticks=born.start_ticks,
            log=str(folder / "logs" / f"{file_stem(born.name, born.incarnation)}.log"),
            **place,
        )

    def promoted(self, spare: Key, born: wire.Spawned) -> None:
        """Log that a spare is somebody now, and let its log be found under that name, too."""
        rename_files(self._log_path(spare), self._log_path((born.name, born.incarnation)), (".log",))
        self.spawned(born)

    def dying(self, record: wire.Dying) -> None:
        """Log that an incarnation takes no more calls."""
        self._log.emit("child_dying", child=record.name, incarnation=record.incarnation, reason=record.reason)

    def was_spare(self, spare: Key, key: Key) -> None:
        """Let the crash reports that its agent wrote of a spare be found under the name it had last."""
        rename_files(self._crash_path(spare), self._crash_path(key), (".txt", ".json"))

    def gone(
        self, key: Key, pid: int, how: Exit, *, doing: str = "", last: str = "", lag_s: float = 0.0
    ) -> None:
        """Log an end, and begin to gather its crash folder if it was abnormal.

        Args:
            key: whose.
            pid: of its process.
            how: it ended.
            doing: see `crash.Death`, as for the next two.
            last: the same.
            lag_s: the same.
        """
        death = Death(
            name=key[0],
            incarnation=key[1],
            pid=pid,
            exit=how,
            log=self._log_path(key),
            crash=self._crash_path(key),
            doing=doing,
            last=last,
            lag_s=lag_s,
        )
        line = death.line
        self._log.emit(
            "child_exited",
            child=key[0],
            incarnation=key[1],
            pid=pid,
            reason=str(how),
            exit=how.kind.value,
            code=how.code,
            signal=how.signal,
            line=line,
        )
        self._crashes.gather(death, line)

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Log what the policy reports."""
        self._log.emit(kind, **fields)

    def close(self) -> None:
        """Return when every crash folder that was begun is written."""
        self._crashes.close()

    def _log_path(self, key: Key) -> Path:
        return Path(self._config.run_dir) / "logs" / f"{file_stem(*key)}.log"

    def _crash_path(self, key: Key) -> Path:
        return Path(self._config.run_dir) / "crash" / file_stem(*key)


def _outline(node: NodeStatus) -> dict[str, Any]:
    """Return who is below whom, in the order of the spec."""
    if not node.is_supervisor:
        return {"name": node.name}
    return {"name": node.name, "children": [_outline(child) for child in node.children]}
