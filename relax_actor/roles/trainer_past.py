"""What a trainer that comes back must know: its newest checkpoint, and how far versions have gone."""

import time
from pathlib import Path

import msgspec

from relax_actor.actor import Context
from relax_actor.files import replace_text
from relax_actor.ids import PolicyVersion
from relax_actor.trainers.base import TrainerBackend
from relax_actor.trainers.checkpoint import Checkpoint, CheckpointStore

VERSION_FILE = "policy_version"
"""In the run folder: the highest version ever published, so that a resumed run goes on above it."""


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of the run beside the backend's files."""

    step: int = 0
    policy_version: int = 0
    trained: str = ""  # JSON of transfer_queue.records.TrainedSet; empty at step 0
    run_id: str = ""  # which run saved it: a run folder may hold several, one resumed from the other


class TrainerPast:
    """Saves and finds checkpoints of one run folder.

    Args:
        context: the trainer's.
        backend: writes and reads weights and optimizer.
        keep: how many checkpoints stay.
    """

    def __init__(self, context: Context, backend: TrainerBackend, *, keep: int) -> None:
        self._context, self._backend = context, backend
        self._store = CheckpointStore(context.run_dir / "checkpoints", keep=max(1, keep))

    def load(self, resume: str) -> CheckpointMeta:
        """Load this run's newest checkpoint into a restarted trainer, or the one to resume from, or none."""
        checkpoint = self._own_newest() if self._context.incarnation > 1 else None
        if checkpoint is None and resume:
            checkpoint = self._store.open(Path(resume))
        if checkpoint is None:
            return CheckpointMeta()
        self._backend.load(checkpoint.path)
        meta = msgspec.convert(checkpoint.meta, CheckpointMeta)
        self._context.events.emit("checkpoint_loaded", step=meta.step, path=str(checkpoint.path))
        return meta

    def save(self, step: int, version: PolicyVersion, trained: str) -> None:
        """Write a checkpoint, whole or not at all."""
        started = time.monotonic()
        run_id = self._context.run_id
        meta = CheckpointMeta(step=step, policy_version=version, trained=trained, run_id=run_id)
        with self._context.events.span("checkpoint", step=step):
            path = self._store.save(step, self._backend.save, msgspec.structs.asdict(meta))
        seconds = time.monotonic() - started
        self._context.events.emit("checkpoint_saved", step=step, path=str(path), seconds=seconds)

    def note_version(self, version: PolicyVersion) -> None:
        """Remember that this version is about to be published."""
        replace_text(self._context.run_dir / VERSION_FILE, str(version))

    def next_version(self, in_memory: PolicyVersion | None) -> PolicyVersion:
        """Return a version above all that were published in this run folder or are in shared memory."""
        file = self._context.run_dir / VERSION_FILE
        recorded = int(file.read_text()) if file.exists() else -1
        return PolicyVersion(max(recorded, -1 if in_memory is None else in_memory) + 1)

    def _own_newest(self) -> Checkpoint | None:
        """Return the newest checkpoint if it is of this run, not one of a future that a resume has left."""
        newest = self._store.latest()
        is_own = newest is not None and newest.meta.get("run_id") == self._context.run_id
        return newest if is_own else None
