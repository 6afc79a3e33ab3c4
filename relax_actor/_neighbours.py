"""Make sure that `transport` and `launcher` are ours, whatever lies beside the user's script.

Both import names are general. A script's folder comes first on `sys.path`, so a user's own `transport.py`
would be found instead of the package that was installed with this one.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


def claim(name: str) -> None:
    """Load our package of this name before anything asks for it.

    Raises:
        ImportError: the program has imported another module of that name already.
    """
    loaded = sys.modules.get(name)
    if loaded is not None:
        _check_ours(name, str(loaded.__file__))
        return
    spec = importlib.machinery.PathFinder.find_spec(name, [str(HOME)])
    if spec is None or spec.loader is None:
        raise ImportError(f"the package `{name}` is not beside {HOME / 'relax_actor'}: install again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _check_ours(name: str, file: str) -> None:
    if Path(file).resolve().parent.parent != HOME:
        raise ImportError(
            f"`{name}` is {file} in this program, which hides relax-actor's own package\n\n"
            "hint: import relax_actor first, or rename that module"
        )
