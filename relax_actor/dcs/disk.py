"""The route of last resort: the newest checkpoint of the run, as the trainer wrote it."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from relax_actor.dcs.manifest import BucketEntry, Dtype, Manifest, PolicyCorruptError, TensorEntry
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.routes import Route
from relax_actor.dcs.source import SourceUnavailableError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from relax_actor.trainers.checkpoint_manifest import CheckpointError, FileRecord, described, read_manifest

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FOLDER = "model"

# How safetensors calls the element types.
_DTYPES = {
    "BOOL": Dtype.BOOL,
    "U8": Dtype.UINT8,
    "U16": Dtype.UINT16,
    "U32": Dtype.UINT32,
    "U64": Dtype.UINT64,
    "I8": Dtype.INT8,
    "I16": Dtype.INT16,
    "I32": Dtype.INT32,
    "I64": Dtype.INT64,
    "F16": Dtype.FLOAT16,
    "F32": Dtype.FLOAT32,
    "F64": Dtype.FLOAT64,
    "BF16": Dtype.BFLOAT16,
    "F8_E4M3": Dtype.FLOAT8_E4M3FN,
    "F8_E5M2": Dtype.FLOAT8_E5M2,
}


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that holds a policy version."""

    version: PolicyVersion
    step: int
    files: dict[Path, FileRecord]  # of the model's weights, by path


class DiskSource:
    """The checkpoints of a run folder.

    Args:
        folder: where checkpoints are; it need not exist.
    """

    route = Route.DISK

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def latest(self) -> PolicyVersion | None:
        """Return the version of the newest checkpoint; reads its manifest, not its weights."""
        saved = self._newest()
        return saved.version if saved else None

    def open(self, version: PolicyVersion) -> AbstractContextManager["DiskVersion"]:
        """Open the newest checkpoint, every byte of its weights checked.

        Raises:
            SourceUnavailableError: there is no whole checkpoint.
            PolicyMissingError: it is of another version.
            PolicyCorruptError: a file of it is not what was written.
        """
        saved = self._newest()
        if saved is None:
            raise SourceUnavailableError(self.route, f"no checkpoint in {self._folder}")
        if saved.version != version:
            raise PolicyMissingError(version, saved.version, "on disk")
        return contextlib.nullcontext(DiskVersion(saved))

    def _newest(self) -> Saved | None:
        for path in sorted(self._folder.glob("checkpoint-*-step-*"), reverse=True):
            with contextlib.suppress(CheckpointError, KeyError):  # one that is being removed, or not ours
                return _saved(path)
        return None


class DiskVersion:
    """A checkpoint's weights; one file is one bucket.

    Raises:
        PolicyCorruptError: a file is missing, or not what was written.
    """

    def __init__(self, saved: Saved) -> None:
        self._paths = list(saved.files)
        for index, (path, record) in enumerate(saved.files.items()):
            _check(saved.version, index, path, record)
        tensors = tuple(_entries(self._paths))
        buckets = tuple(BucketEntry(nbytes=r.size_bytes, xxh3=r.xxh3) for r in saved.files.values())
        self.manifest = Manifest(version=saved.version, step=saved.step, tensors=tensors, buckets=buckets)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with its weights."""
        return tuple(self._paths)

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield names and tensors, file by file.

        Raises:
            PolicyCorruptError: a file is gone.
        """
        from safetensors import safe_open  # noqa: PLC0415 - with torch, which only the reader needs

        for index, path in enumerate(self._paths):
            point("install_bucket")
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dictionary
                        yield name, file.get_tensor(name)
            except OSError as error:
                raise PolicyCorruptError(self.manifest.version, index, path.name, str(error)) from error


def _saved(path: Path) -> Saved:
    manifest = read_manifest(path)
    files = {
        path / name: record
        for name, record in manifest.files.items()
        if Path(name).parent.name == MODEL_FOLDER and name.endswith(".safetensors")
    }
    version = msgspec.convert(manifest.meta["policy_version"], int)
    return Saved(version=PolicyVersion(version), step=manifest.step, files=files)


def _check(version: PolicyVersion, index: int, path: Path, record: FileRecord) -> None:
    try:
        found = described(path)
    except OSError as error:
        raise PolicyCorruptError(version, index, record.xxh3, str(error.strerror)) from error
    if found != record:
        raise PolicyCorruptError(version, index, record.xxh3, found.xxh3)


def _entries(paths: list[Path]) -> Iterator[TensorEntry]:
    for bucket, path in enumerate(paths):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(header_bytes))
        for name, tensor in header.items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield TensorEntry(
                    name=name,
                    dtype=_DTYPES[tensor["dtype"]],
                    shape=tuple(tensor["shape"]),
                    bucket=bucket,
                    offset=8 + header_bytes + first,
                    nbytes=end - first,
                )
