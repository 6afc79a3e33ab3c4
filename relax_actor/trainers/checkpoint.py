"""Checkpoint folders that are whole or do not count.

A checkpoint is written into a hidden folder, every file is forced to disk, a manifest with sizes and
checksums comes last, and only then does a rename make it visible. So whatever dies, and whenever, the
newest visible checkpoint is whole or can be told to be damaged, and the one before it is untouched.

Folders are named in the order of saving, not by step alone: a run that goes back to an earlier step
and on from there must find its own later checkpoints, not those of the future it left.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.trainers.checkpoint_manifest import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    FileRecord,
    described,
    read_manifest,
    verified,
    write_manifest,
)

__all__ = ["Checkpoint", "CheckpointError", "CheckpointSpaceError", "CheckpointStore"]

_PREFIX = "checkpoint-"
_PARTIAL = ".partial-"
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class CheckpointSpaceError(RelaxError):
    """A checkpoint does not fit on the disk; those written before are untouched.

    Args:
        folder: where it should have gone.
        need_bytes: what it needs, at least.
        have_bytes: what was free before it was written.
    """

    def __init__(self, folder: Path, need_bytes: int, have_bytes: int) -> None:
        self.folder, self.need_bytes, self.have_bytes = folder, need_bytes, have_bytes
        super().__init__(
            f"a checkpoint needs at least {need_bytes} bytes in {folder} and {have_bytes} are free\n\n"
            "hint: free some space or lower `train.keep_checkpoints`; "
            "the checkpoints before this one are whole"
        )


class CheckpointStore:
    """The checkpoints of one run; one process writes.

    Args:
        folder: created at the first save.
        keep: how many to keep, at least 1.

    Attributes:
        ignored: why the last `latest` passed over a newer folder, by path.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self._folder = folder
        self._keep = keep
        self.ignored: dict[Path, str] = {}

    def save(self, step: int, write: Callable[[Path], None], meta: Mapping[str, object]) -> Path:
        """Write a checkpoint and then remove the oldest ones.

        Args:
            step: training steps done.
            write: writes files and folders into the folder it is given.
            meta: plain data that JSON can hold.

        Returns:
            The new checkpoint's folder.

        Raises:
            CheckpointSpaceError: the disk or the quota is full.
            TypeError: `meta` is not plain data.
            ValueError: `write` made a file named manifest.json.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_partial()
        have_bytes = shutil.disk_usage(self._folder).free
        self._require_space(have_bytes)
        serial = self._last_serial() + 1
        partial = self._folder / f"{_PARTIAL}{serial:06}"
        try:
            self._write(partial, step, write, meta)
            path = self._publish(partial, self._folder / f"{_PREFIX}{serial:06}-step-{step}")
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if _is_out_of_space(error):
                raise CheckpointSpaceError(self._folder, have_bytes + 1, have_bytes) from error
            raise
        self._prune()
        return path

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None; `ignored` then tells what was passed over."""
        self.ignored = {}
        for path in reversed(self._paths()):
            try:
                return verified(path)
            except CheckpointError as error:
                self.ignored[path] = error.reason
        return None

    def open(self, which: Path | int) -> Checkpoint:
        """Return the checkpoint in a folder, or the newest of a step.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if isinstance(which, Path):
            return verified(which)
        for path in reversed(self._paths()):
            if path.name.endswith(f"-step-{which}"):
                return verified(path)
        raise CheckpointError(self._folder, f"no checkpoint of step {which} in it")

    def _paths(self) -> list[Path]:
        """Return the visible checkpoint folders in the order of saving."""
        return sorted(self._folder.glob(f"{_PREFIX}*-step-*"), key=_serial)

    def _last_serial(self) -> int:
        return max((_serial(path) for path in self._paths()), default=0)

    def _remove_partial(self) -> None:
        for path in self._folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path)

    def _require_space(self, have_bytes: int) -> None:
        """Expect the next checkpoint to be as large as the last; the first one has to be tried."""
        need_bytes = max((_recorded_bytes(path) for path in self._paths()[-1:]), default=0)
        if need_bytes > have_bytes:
            raise CheckpointSpaceError(self._folder, need_bytes, have_bytes)

    def _write(
        self, partial: Path, step: int, write: Callable[[Path], None], meta: Mapping[str, object]
    ) -> None:
        partial.mkdir()
        write(partial)
        if (partial / MANIFEST).exists():
            raise ValueError(f"{MANIFEST} is the name of the checkpoint's own list of files")
        files = {str(path.relative_to(partial)): _settled(path) for path in _files(partial)}
        point("checkpoint_manifest")
        _sync(write_manifest(partial, step, files, meta))
        for path in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
            _sync(path)

    def _publish(self, partial: Path, path: Path) -> Path:
        point("checkpoint_rename")
        partial.rename(path)
        _sync(self._folder)
        return path

    def _prune(self) -> None:
        """Remove all but the newest; the one just written is whole, so one always is."""
        for path in self._paths()[: -self._keep]:
            (path / MANIFEST).unlink(missing_ok=True)  # first: half of a checkpoint must not look whole
            shutil.rmtree(path)


def _serial(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX).split("-")[0]
    return int(digits) if digits.isdigit() else 0


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _settled(path: Path) -> FileRecord:
    """Force a file to disk and describe it."""
    point("checkpoint_file")
    _sync(path)
    return described(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _recorded_bytes(path: Path) -> int:
    try:
        return read_manifest(path).size_bytes
    except CheckpointError:
        return 0


def _is_out_of_space(error: BaseException) -> bool:
    """Recognise it also from libraries that turn the operating system's error into text."""
    if isinstance(error, OSError) and error.errno in _SPACE_ERRORS:
        return True
    return any(f"os error {number}" in str(error) for number in _SPACE_ERRORS)
