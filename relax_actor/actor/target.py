"""Finding the actor class that a child spec names."""

import importlib
import importlib.util
import sys
from typing import Any

from relax_actor.actor.base import Actor


def load_target(target: str) -> type[Actor]:
    """Find an actor class named `module:Class`, or `path.py:Class` for one of the user's script.

    Raises:
        TypeError: what was found is not an actor class.
    """
    where, _, name = target.rpartition(":")
    module: Any = _load_script(where) if where.endswith(".py") else importlib.import_module(where)
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"{target} is not a subclass of relax_actor.Actor")
    return found


def _load_script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("__relax_main__", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__relax_main__"] = module
    spec.loader.exec_module(module)
    return module
