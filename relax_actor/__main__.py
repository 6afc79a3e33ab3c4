"""The command line: `relax-actor` and `python -m relax_actor` both come here.

Not `launcher.cli` directly: the working directory or PYTHONPATH may hold a user's own `launcher.py`.
"""

import signal

from relax_actor._neighbours import claim


def main() -> None:
    """Run the command line."""
    claim("launcher")
    from launcher.cli import main as run  # noqa: PLC0415 - only after the name is ours

    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is over: its exit code is that of the command


if __name__ == "__main__":
    main()
