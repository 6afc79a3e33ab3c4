"""The route `disk`: the server reads a version's files itself, and a cold start from them.

A version's buckets in shared memory are `.safetensors` files, so a folder of links to them, beside the
model's own configuration, is a model. A version that is not there any more may be in a checkpoint.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from relax_actor.dcs.disk import DiskSource
from relax_actor.dcs.manifest import PolicyCorruptError
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver
from relax_actor.dcs.source import SourceUnavailableError
from relax_actor.engines.sglang.weights.calls import Calls
from relax_actor.engines.sglang.weights.errors import RouteClosedError
from relax_actor.engines.sglang.weights.payload import Bucket
from relax_actor.engines.sglang.weights.plan import Step
from relax_actor.engines.sglang.weights.records import Deadlines, Loaded
from relax_actor.engines.sglang.weights.routes import UpdateRoute
from relax_actor.ids import PolicyVersion
from relax_actor.model_files import side_files
from transport.shm import ShmSpace

_PATH = "/update_weights_from_disk"
_MISSING = (PolicyMissingError, PolicyCorruptError, SourceUnavailableError, OSError)


class VersionFiles(Protocol):
    """Where a policy version is as files."""

    def open(self, version: PolicyVersion) -> contextlib.AbstractContextManager[Sequence[Path]]:
        """Return its `.safetensors` files, verified; they stay until the context ends.

        Raises:
            PolicyMissingError: it is not there.
            PolicyCorruptError: it is damaged.
            SourceUnavailableError: nothing is there.
        """
        ...


class SharedMemoryFiles:
    """The buckets in this host's shared memory.

    Args:
        space: of the run.
    """

    def __init__(self, space: ShmSpace) -> None:
        self._space, self._receiver = space, PolicyReceiver(space)

    @contextlib.contextmanager
    def open(self, version: PolicyVersion) -> Iterator[Sequence[Path]]:
        """Lease and verify a version; see `VersionFiles`."""
        with self._receiver.open(version) as snapshot:
            snapshot.verify()
            yield [self._space.root / bucket.name for bucket in snapshot.buckets()]


class CheckpointFiles:
    """The newest checkpoint of the run.

    Args:
        folder: where checkpoints are.
    """

    def __init__(self, folder: Path) -> None:
        self._source = DiskSource(folder)

    @contextlib.contextmanager
    def open(self, version: PolicyVersion) -> Iterator[Sequence[Path]]:
        """Verify a version; see `VersionFiles`."""
        with self._source.open(version) as saved:
            yield saved.files


@contextlib.contextmanager
def model_folder(files: Sequence[Path], model_path: Path, scratch: Path) -> Iterator[Path]:
    """Make a model folder of links.

    Args:
        files: `.safetensors` files with all weights.
        model_path: whose configuration and tokenizer are taken.
        scratch: where the folder is made; it is gone afterwards.

    Yields:
        The folder: what `--model-path` or an update takes.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-", dir=scratch) as name:
        folder = Path(name)
        for path in side_files(model_path):
            (folder / path.name).symlink_to(path.resolve())
        for index, path in enumerate(files, 1):
            label = f"model-{index:05}-of-{len(files):05}.safetensors"
            (folder / label).symlink_to(path.resolve())
        yield folder


class DiskWay:
    """Has the server read files.

    Args:
        places: where versions may be found, the quickest first.
        model_path: of the model that is being trained.
        scratch: where model folders may be made.
        deadlines: of the call.
    """

    route = UpdateRoute.DISK

    def __init__(
        self, places: Sequence[VersionFiles], model_path: Path, scratch: Path, deadlines: Deadlines
    ) -> None:
        self._places, self._model_path, self._scratch = places, model_path, scratch
        self._deadlines = deadlines
        self._held = contextlib.ExitStack()
        self._files: Sequence[Path] = ()

    def prepare(self, calls: Calls, first: Bucket) -> None:  # noqa: ARG002 - other ways send it
        """Find the version.

        Raises:
            RouteClosedError: it is nowhere.
        """
        assert calls.version is not None  # noqa: S101 - an update always has one
        self._held.close()  # of an update that was not begun
        failures = []
        for place in self._places:
            try:
                self._files = self._held.enter_context(place.open(calls.version))
            except _MISSING as error:
                failures.append(str(error))
            else:
                return
        raise RouteClosedError(self.route, "; ".join(failures) or "versions are no files here")

    def load(self, calls: Calls, stream: Iterator[Bucket]) -> Loaded:  # noqa: ARG002 - the server reads
        """Have the server read the files."""
        nbytes = sum(path.stat().st_size for path in self._files)
        with self._held, model_folder(self._files, self._model_path, self._scratch) as folder:
            body = {
                "model_path": str(folder),
                "load_format": "auto",
                "flush_cache": False,
                "weight_version": str(calls.version),
            }
            calls.post(Step.LOAD, _PATH, body, self._deadlines.of(nbytes))
        return Loaded(nbytes=nbytes, buckets=len(self._files))

    def close(self) -> None:
        """Let go of the files."""
        self._held.close()
