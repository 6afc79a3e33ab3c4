"""`relax-actor dcs ls` and `verify`: the policy versions of a run in this host's shared memory.

Nothing here asks an actor. A version is leased while its bytes are read, as by a rollout, so the run goes on.
"""

import contextlib
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TextIO

import msgspec

from launcher.columns import aligned, size
from launcher.dcs_run import DcsRun
from launcher.errors import ExitCode, RunFolderError
from relax_actor.dcs.latest import LatestReader
from relax_actor.dcs.manifest import MANIFEST_LABEL, OWNER, Manifest, PolicyCorruptError
from relax_actor.ids import PolicyVersion
from transport.segment import SegmentMissingError
from transport.shm import ShmSpace

_LOCKS = Path("/proc/locks")
_HEADER = ("version", "state", "step", "tensors", "buckets", "bytes", "readers")
_RIGHT = frozenset(_HEADER) - {"state"}


class State(StrEnum):
    """How a version is."""

    NEWEST = "newest"
    KEPT = "kept"
    UNFINISHED = "unfinished"  # no manifest: it is being written, retired, or its publisher has died
    CORRUPT = "corrupt"  # its manifest is not what was written


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy version; what only a manifest can say is None without one."""

    version: PolicyVersion
    state: State
    step: int | None = None
    tensors: int | None = None
    buckets: int | None = None
    nbytes: int | None = None
    reader_pids: tuple[int, ...] = ()  # processes that hold a lease


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one part of a version."""

    bucket: int | None  # None: the manifest
    expected: str
    found: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a version is as published."""

    version: PolicyVersion
    corrupt: tuple[Damage, ...]
    buckets: int | None = None  # None where the version cannot be opened
    nbytes: int | None = None


def ls(run: DcsRun, out: TextIO, *, as_json: bool = False) -> None:
    """Print a table of versions, oldest first, or a JSON array of rows.

    Raises:
        RunFolderError: the run has ended, or is elsewhere, and nothing is here.
    """
    if not run.is_running:
        run.require_versions()
    rows = version_rows(run)
    if as_json:
        out.write(msgspec.json.encode(rows).decode() + "\n")
        return
    lines = aligned(_HEADER, [_cells(row) for row in rows], _RIGHT) if rows else ["no policy version yet"]
    out.writelines(f"{line}\n" for line in lines)


def version_rows(run: DcsRun) -> list[VersionRow]:
    """Return what there is, oldest version first."""
    versions = run.versions()
    newest = LatestReader(run.space).load() if versions else None
    return [_row(run.space, version, newest) for version in versions]


def verify(
    run: DcsRun,
    out: TextIO,
    version: PolicyVersion | None,
    *,
    only_newest: bool = False,
    as_json: bool = False,
) -> int:
    """Compare every bucket with its checksum and say what is corrupt.

    Args:
        run: whose versions.
        out: where to.
        version: which one; None: all of them.
        only_newest: of all of them only the newest.
        as_json: print a JSON array of verdicts.

    Returns:
        The exit status: 1 if anything is corrupt.

    Raises:
        RunFolderError: no version is there, or not that one.
    """
    run.require_versions()
    is_one = only_newest or version is not None
    verdicts = [_verdict(run, version)] if is_one else list(_verdicts(run))
    if as_json:
        out.write(msgspec.json.encode(verdicts).decode() + "\n")
    else:
        out.writelines(f"{line}\n" for verdict in verdicts for line in _lines(verdict))
    return ExitCode.RUN_FAILED if any(verdict.corrupt for verdict in verdicts) else ExitCode.DONE


def _row(space: ShmSpace, version: PolicyVersion, newest: PolicyVersion | None) -> VersionRow:
    try:
        with space.attach(space.name(OWNER, version, MANIFEST_LABEL)) as segment:
            manifest = Manifest.from_bytes(bytes(segment.buf), version)
    except SegmentMissingError:
        return VersionRow(version=version, state=State.UNFINISHED)
    except PolicyCorruptError:
        return VersionRow(version=version, state=State.CORRUPT)
    return VersionRow(
        version=version,
        state=State.NEWEST if version == newest else State.KEPT,
        step=manifest.step,
        tensors=len(manifest.tensors),
        buckets=len(manifest.buckets),
        nbytes=manifest.nbytes,
        reader_pids=_reader_pids(space, version),
    )


def _reader_pids(space: ShmSpace, version: PolicyVersion) -> tuple[int, ...]:
    """Return who holds a shared lock on any bucket, as the kernel lists them."""
    files = set()
    for name in space.names(OWNER, version):
        with contextlib.suppress(FileNotFoundError):  # retired a moment ago
            stat = (space.root / name).stat()
            files.add(f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}")
    locks = (line.split() for line in _LOCKS.read_text("utf-8").splitlines())
    return tuple(
        sorted({int(lock[4]) for lock in locks if lock[1:4:2] == ["FLOCK", "READ"] and lock[5] in files})
    )


def _cells(row: VersionRow) -> tuple[str, ...]:
    numbers = ("" if number is None else str(number) for number in (row.step, row.tensors, row.buckets))
    nbytes = "" if row.nbytes is None else size(row.nbytes)
    return (str(row.version), row.state, *numbers, nbytes, str(len(row.reader_pids)))


def _verdicts(run: DcsRun) -> Iterator[Verdict]:
    for version, is_complete in run.versions().items():
        with contextlib.suppress(RunFolderError):  # retired meanwhile
            if is_complete:
                yield _verdict(run, version)


def _verdict(run: DcsRun, version: PolicyVersion | None) -> Verdict:
    try:
        with run.open(version) as snapshot:
            corrupt = tuple(_damage(error) for error in snapshot.damages())
            manifest = snapshot.manifest
    except PolicyCorruptError as error:
        return Verdict(version=error.version, corrupt=(_damage(error),))
    buckets, nbytes = len(manifest.buckets), manifest.nbytes
    return Verdict(version=manifest.version, corrupt=corrupt, buckets=buckets, nbytes=nbytes)


def _damage(error: PolicyCorruptError) -> Damage:
    return Damage(bucket=error.bucket, expected=error.expected, found=error.found)


def _lines(verdict: Verdict) -> list[str]:
    if not verdict.corrupt:
        what = f"{verdict.buckets} bucket{'s' * (verdict.buckets != 1)}, {size(verdict.nbytes or 0)}"
        return [f"policy version {verdict.version}: {what}, as published"]
    return [
        str(PolicyCorruptError(verdict.version, damage.bucket, damage.expected, damage.found))
        for damage in verdict.corrupt
    ]
