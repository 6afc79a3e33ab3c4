"""Which run's policy versions are meant, and where they lie: a run folder, or the id of a run."""

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import RunFolderError
from launcher.runfolder import RunFolder
from launcher.view import RunView
from relax_actor.dcs.manifest import MANIFEST_LABEL, OWNER
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver, PolicySnapshot
from relax_actor.ids import PolicyVersion
from transport.segment import SegmentNameError
from transport.shm import ShmSpace, other_runs, parse_name

_SHM_ROOT = "/dev/shm"  # noqa: S108 - where the kernel keeps shared memory


@dataclass(frozen=True, kw_only=True)
class DcsRun:
    """A run, by what is in this host's shared memory."""

    label: str  # as it was asked for
    space: ShmSpace
    view: RunView | None  # None: only its id is known

    @property
    def is_running(self) -> bool:
        """Whether versions may still come; of an id alone: as long as there are any."""
        return self.view is None or self.view.is_running

    def versions(self) -> dict[PolicyVersion, bool]:
        """Return all versions, oldest first, each with whether it has its manifest and so is complete."""
        here = [parse_name(name) for name in self.space.names(OWNER)] if self.space.root.is_dir() else []
        complete = {name.incarnation for name in here if name.label == MANIFEST_LABEL}
        return {PolicyVersion(n): n in complete for n in sorted({name.incarnation for name in here})}

    def require_versions(self) -> None:
        """Refuse to go on where none is complete.

        Raises:
            RunFolderError: says whether there was none yet, there are none any more, or they are elsewhere.
        """
        if not any(self.versions().values()):
            raise RunFolderError(*self._nothing())

    def open(self, version: PolicyVersion | None) -> PolicySnapshot:
        """Lease a version; None is the newest.

        Raises:
            RunFolderError: it is not there.
            PolicyCorruptError: it cannot be opened.
        """
        try:
            return PolicyReceiver(self.space).open(version)
        except PolicyMissingError as error:
            raise RunFolderError(str(error), f"relax-actor dcs ls {self.label} lists what there is") from None

    def _nothing(self) -> tuple[str, str]:
        if self.view is not None and not self.view.is_running:
            fact = f"`{self.label}` has ended, and its policy versions went with it"
            return fact, _newest_checkpoint(self.view.folder)
        if self.view is not None and not self.view.is_here:
            return f"no policy version of `{self.label}` is on this host", f"ask on {self.view.lives.host}"
        return (
            f"`{self.label}` has published no policy version yet",
            "its trainer publishes the first when it is ready",
        )


def find_run(word: str) -> DcsRun:
    """Return the run that a word means: its folder, or its id while it has shared memory here.

    Raises:
        RunFolderError: neither, or the run has not begun.
    """
    path = Path(word)
    if not path.exists() and word in other_runs(_SHM_ROOT):
        return DcsRun(label=word, space=ShmSpace(word, _SHM_ROOT), view=None)
    view = RunView(RunFolder.open(path))
    try:
        space = ShmSpace(view.lives.run_id, view.lives.shm_root or _SHM_ROOT)
    except SegmentNameError:
        raise RunFolderError(f"`{word}` has not begun", f"relax-actor status {word}") from None
    return DcsRun(label=word, space=space, view=view)


def _newest_checkpoint(folder: RunFolder) -> str:
    found = sorted(folder.checkpoints.glob("[!.]*/model"))
    return f"its newest checkpoint is {found[-1]}" if found else "it left no checkpoint"
