"""What the head and its node agents know of one another. Light: the head imports this, and no agent."""

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

END_NOW = signal.SIGUSR2
"""Tells a keeper on the head's own host to kill its agent, which may still be importing, and to sweep."""

EXIT_FENCED = 75
"""Exit code of a keeper, or of an actor that nobody else ended, whose lease was over."""


def agent_identity(host: str, incarnation: int) -> bytes:
    """Return by which name an agent is known to the head's network."""
    return f"agent:{host}#{incarnation}".encode()


def file_stem(name: str, incarnation: int) -> str:
    """Return what the log and the crash reports of an incarnation are called, without folder and suffix."""
    return f"{name.replace('/', '-')}-{incarnation}"


def socket_folders() -> Path:
    """Return this user's folder of folders for sockets; it need not be there."""
    base = Path("/tmp") if len(tempfile.gettempdir()) > 40 else Path(tempfile.gettempdir())  # noqa: S108
    return base / f"rx-{os.getuid()}"


def make_socket_dir(name: str) -> Path:
    """Make a private folder for sockets: short (AF_UNIX allows 107 bytes) and 0700; it may be there.

    It may also be gone again, cleared away with what a dead run left: who opens a file in it will know.

    Raises:
        PermissionError: it belongs to another user.
    """
    folder = socket_folders() / name
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            if each.stat().st_uid != os.getuid():
                raise PermissionError(f"{each} belongs to another user")
    return folder
