"""Why a run that ended in order has failed all the same: a note in the run folder, for its head.

An actor can end a run in order or die and be restarted; where neither is right, because whoever is restarted
would only find the same again, it leaves this note and ends.
"""

from pathlib import Path

from relax_actor.files import replace_text

FILE = "failure.txt"


def leave(run_dir: Path, reason: str) -> None:
    """Say why the run has failed."""
    replace_text(run_dir / FILE, reason)


def find(run_dir: Path) -> str:
    """Return why the run has failed, or nothing."""
    file = run_dir / FILE
    return file.read_text() if file.exists() else ""


def clear(run_dir: Path) -> None:
    """Forget what an earlier run in this folder has said."""
    (run_dir / FILE).unlink(missing_ok=True)
