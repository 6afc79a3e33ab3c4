"""`relax-actor dcs export`: a policy version as a Hugging Face model folder.

Buckets are `.safetensors` files already, so they are copied as they are, or linked to. The folder is written
beside its place and renamed, so it is whole or not there.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from launcher.columns import size
from launcher.dcs_run import DcsRun
from launcher.errors import RunFolderError
from launcher.settings import load
from relax_actor.dcs.manifest import Manifest
from relax_actor.dcs.receiver import PolicySnapshot
from relax_actor.ids import PolicyVersion
from relax_actor.model_files import copy_side_files

_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and where."""

    folder: str
    version: PolicyVersion
    step: int
    files: int
    nbytes: int
    linked: bool  # into shared memory, for as long as the version is kept


def export(
    run: DcsRun,
    out: TextIO,
    version: PolicyVersion | None,
    folder: Path,
    *,
    model: Path | None = None,
    link: bool = False,
    as_json: bool = False,
) -> None:
    """Write a version that a stock loader reads.

    Args:
        run: whose version.
        out: where to say what was done.
        version: which one; None: the newest.
        folder: to be made.
        model: the folder whose configuration and tokenizer are copied; None: the run's own.
        link: lay symbolic links into shared memory instead of copies.
        as_json: say it in JSON.

    Raises:
        RunFolderError: the version is not there, `folder` is, or there is no such model.
        PolicyCorruptError: it is not what was published; nothing is written.
    """
    run.require_versions()
    origin = _origin(run, model)
    with run.open(version) as snapshot, _made(folder) as partial:
        snapshot.verify()
        _write_weights(snapshot, run, partial, link=link)
        copy_side_files(origin, partial)
        done = _exported(snapshot.manifest, folder, link=link)
    out.write((msgspec.json.encode(done).decode() if as_json else _said(done)) + "\n")


def file_name(index: int, count: int) -> str:
    """Return what Hugging Face calls file number `index`, from 0, of a model's `count`."""
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def weight_index(manifest: Manifest) -> dict[str, object]:
    """Return the index that says which tensor is in which file."""
    count = len(manifest.buckets)
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in manifest.tensors)},
        "weight_map": {tensor.name: file_name(tensor.bucket, count) for tensor in manifest.tensors},
    }


def _origin(run: DcsRun, model: Path | None) -> Path:
    origin = model or _trained_model(run)
    if not (origin / _CONFIG).is_file():
        raise RunFolderError(
            f"`{origin}` has no {_CONFIG}", "--model names the folder of the model that is trained"
        )
    return origin


def _trained_model(run: DcsRun) -> Path:
    if run.view is None or not run.view.folder.resolved.exists():
        fact = f"which model `{run.label}` trains is not written down"
        raise RunFolderError(fact, "--model names its folder")
    return Path(load(run.view.folder.resolved).model.path)


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    if folder.exists() or folder.is_symlink():
        raise RunFolderError(f"`{folder}` is there already", "name another folder, or remove it")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise RunFolderError(
            f"`{folder}` cannot be written: {error.strerror}", "name another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(snapshot: PolicySnapshot, run: DcsRun, folder: Path, *, link: bool) -> None:
    count = len(snapshot.manifest.buckets)
    for index, segment in enumerate(snapshot.buckets()):
        path = folder / file_name(index, count)
        if link:
            path.symlink_to(run.space.root / segment.name)
        else:
            path.write_bytes(segment.buf)
    (folder / _INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(weight_index(snapshot.manifest))))


def _exported(manifest: Manifest, folder: Path, *, link: bool) -> Exported:
    return Exported(
        folder=str(folder),
        version=manifest.version,
        step=manifest.step,
        files=len(manifest.buckets),
        nbytes=manifest.nbytes,
        linked=link,
    )


def _said(done: Exported) -> str:
    files = f"{done.files} file{'s' * (done.files != 1)}, {size(done.nbytes)}"
    linked = f"\nthe links lead nowhere once version {done.version} is retired" if done.linked else ""
    return f"{done.folder}: policy version {done.version} of step {done.step}: {files}{linked}"
