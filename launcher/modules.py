"""Whether a reward function can be found, without importing anything of the user's.

Importing would run the user's code, and often torch, in the launcher. So the module is looked up on the
path and its source is parsed; what cannot be told that way is left to the reward actor's own start.
"""

import ast
import importlib.machinery
import sys
from pathlib import Path

from launcher.fields import nearest
from relax_actor.rewards.registry import RewardFunctionError, check_name


def why_not_importable(function: str, user_path: str) -> tuple[str, str] | None:
    """Return fact and hint where a reward function cannot be found, else None.

    Args:
        function: a registered name or `module:function`.
        user_path: folder searched after everything installed; may be empty.
    """
    module, colon, attribute = function.partition(":")
    try:
        check_name(function)
    except RewardFunctionError as error:
        return error.fact, error.hint
    if not colon:
        return None
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        return f"is not of the form module:function, got {function}", ""
    spec = _find(module, [*sys.path, user_path] if user_path else sys.path)
    if spec is None:
        place = f" or in {user_path}" if user_path else ""
        return f"names module `{module}`, which is neither installed{place}", "run.user_path is searched too"
    return _missing_name(spec, attribute.partition(".")[0])


def _find(module: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    spec = None
    prefix = ""
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(prefix + part, path)
        if spec is None:
            return None
        prefix += part + "."
        path = list(spec.submodule_search_locations or ())
    return spec


def _missing_name(spec: importlib.machinery.ModuleSpec, attribute: str) -> tuple[str, str] | None:
    source = Path(spec.origin or "")
    if source.suffix != ".py":
        return None
    try:
        names = _names(ast.parse(source.read_text("utf-8")))
    except (OSError, ValueError, SyntaxError) as error:
        return f"names {source}, which is not a Python module: {error}", ""
    if attribute in names or "*" in names or "__getattr__" in names:
        return None
    close = nearest(attribute, names)
    return f"names `{attribute}`, which {source} does not define", f"did you mean `{close}`?" if close else ""


def _names(module: ast.Module) -> set[str]:
    """Return every name that is bound anywhere in a module; more than its globals, never fewer."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names
