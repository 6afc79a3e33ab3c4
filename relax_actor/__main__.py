"""`python -m relax_actor`: the same command line as `relax-actor`."""

import sys

# `python -m` puts the working directory first on sys.path, where a user's own `launcher.py` may lie.
if sys.path and sys.path[0] not in {"", sys.prefix} and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

from launcher.cli import main

main()
