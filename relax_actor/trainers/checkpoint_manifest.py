"""What tells a whole checkpoint from a torn one: sizes and checksums of its files, and of itself."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from relax_actor.errors import RelaxError

MANIFEST = "manifest.json"

_FORMAT = 1
_CHUNK_BYTES = 2**22


class CheckpointError(RelaxError):
    """A folder is not a whole checkpoint.

    Args:
        path: the folder.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} is not a whole checkpoint: {reason}")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose every byte was found as it was written."""

    path: Path
    step: int  # training steps done
    meta: dict[str, object]  # what the writer wanted to remember


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a file must be."""

    size_bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json, followed by a line with its own checksum."""

    format: int
    step: int
    files: dict[str, FileRecord]  # by path within the folder
    meta: dict[str, object]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files.values())


def write_manifest(
    folder: Path, step: int, files: Mapping[str, FileRecord], meta: Mapping[str, object]
) -> Path:
    """Write the manifest of a folder and return its path; it is not yet forced to disk.

    Raises:
        TypeError: `meta` is not plain data.
    """
    manifest = Manifest(format=_FORMAT, step=step, files=dict(files), meta=dict(meta))
    (folder / MANIFEST).write_bytes(_sealed(msgspec.json.encode(manifest)))
    return folder / MANIFEST


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        CheckpointError: it is absent, torn, altered or of another format.
    """
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"it has no readable {MANIFEST}: {error.strerror}") from error
    body = content.partition(b"\n")[0]
    if content != _sealed(body):
        raise CheckpointError(path, f"its {MANIFEST} is torn or was altered")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(path, f"its {MANIFEST} cannot be understood: {error}") from error
    if manifest.format != _FORMAT:
        raise CheckpointError(path, f"it has format {manifest.format}; this version reads {_FORMAT}")
    return manifest


def verified(path: Path) -> Checkpoint:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises:
        CheckpointError: something is missing or differs.
    """
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        try:
            found = described(path / name)
        except OSError as error:
            raise CheckpointError(path, f"{name}: {error.strerror}") from error
        if found.size_bytes != expected.size_bytes:
            raise CheckpointError(path, f"{name} has {found.size_bytes} of {expected.size_bytes} bytes")
        if found != expected:
            raise CheckpointError(path, f"{name} was altered: its checksum differs")
    return Checkpoint(path=path, step=manifest.step, meta=manifest.meta)


def described(path: Path) -> FileRecord:
    """Read a file and return what it must be."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return FileRecord(size_bytes=size_bytes, xxh3=digest.hexdigest())


def _sealed(body: bytes) -> bytes:
    return body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"
