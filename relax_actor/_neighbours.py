"""Make sure that `transport` is ours, whatever lies beside the user's script.

The import names `transport` and `launcher` are general. A script's folder comes first on `sys.path`, so a
user's own `transport.py` would be found instead of the package that was installed with this one.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


def claim_transport() -> None:
    """Load our `transport` before anything asks for it by name.

    Raises:
        ImportError: the program has imported another module of that name already.
    """
    loaded = sys.modules.get("transport")
    if loaded is not None:
        _check_ours(str(loaded.__file__))
        return
    spec = importlib.machinery.PathFinder.find_spec("transport", [str(HOME)])
    if spec is None or spec.loader is None:
        raise ImportError(f"the package `transport` is not beside {HOME / 'relax_actor'}: install again")
    module = importlib.util.module_from_spec(spec)
    sys.modules["transport"] = module
    spec.loader.exec_module(module)


def _check_ours(file: str) -> None:
    if Path(file).resolve().parent.parent != HOME:
        raise ImportError(
            f"`transport` is {file} in this program, which hides relax-actor's own package\n\n"
            "hint: import relax_actor first, or rename that module"
        )
