"""Reward functions by name.

A reward function takes what it wants of these, by keyword, and returns a number:

    def reward(*, response: str, label: str, extra: dict, origin: str, finish_reason: str,
               group_id: int, sample_index: int) -> float

`response` is the sample's text without special tokens, `label` the reference answer, `extra` the other
columns of the dataset row, `origin` its file:line, and `finish_reason` one of stop, length and abort.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from relax_actor.errors import ConfigError

_BUILT_IN = {
    "math": "relax_actor.rewards.math:math_reward",
    "exact": "relax_actor.rewards.math:exact_reward",
}
_OPTION = "reward.function"


class RewardInput(msgspec.Struct, frozen=True, kw_only=True):
    """A sample to score; its fields are the keywords a reward function may take."""

    response: str
    label: str
    extra: dict[str, Any]
    origin: str
    group_id: int
    sample_index: int
    finish_reason: str = "stop"


class RewardFunctionError(ConfigError):
    """The configured reward function cannot be used."""


RewardFunction = Callable[[RewardInput], object]


def resolve(name: str, user_path: str = "") -> RewardFunction:
    """Find a reward function and how to call it; it is inspected once, here.

    Args:
        name: `math`, `exact` or `module:function`; the function may be an attribute of an attribute.
        user_path: a folder that is put at the END of sys.path, so that it hides nothing of ours.

    Returns:
        The function, taking the whole input and returning whatever the function returns.

    Raises:
        RewardFunctionError: no such module or attribute, an import that fails, something that cannot be
            called, or arguments that nobody passes.
    """
    if user_path and str(Path(user_path).absolute()) not in sys.path:
        sys.path.append(str(Path(user_path).absolute()))
    function = _find(_BUILT_IN.get(name, name))
    wanted = _wanted_keywords(function, name)
    return functools.partial(_call, function, wanted)


def check_name(name: str) -> None:
    """Check the form of a function's name without importing anything.

    Raises:
        RewardFunctionError: neither a name of the registry nor `module:function`.
    """
    module, _, attribute = name.partition(":")
    if name not in _BUILT_IN and not (module and attribute):
        known = ", ".join(f"`{known}`" for known in _BUILT_IN)
        raise RewardFunctionError(_OPTION, f"is {name!r}, but must be {known} or `module:function`")


def _find(name: str) -> Callable[..., object]:
    check_name(name)
    module_name, _, path = name.partition(":")
    found: Any = _import(module_name)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise RewardFunctionError(_OPTION, f"names `{name}`, but {module_name} has no `{path}`")
        found = getattr(found, attribute)
    if not callable(found) or inspect.isclass(found):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        raise RewardFunctionError(_OPTION, f"names `{name}`, which is {kind}, not a function")
    if inspect.iscoroutinefunction(found):
        raise RewardFunctionError(
            _OPTION, f"names `{name}`, which is async; a reward function is a plain one"
        )
    function: Callable[..., object] = found
    return function


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise RewardFunctionError(
                _OPTION, f"names module `{name}`, whose import fails: {error}"
            ) from error
        raise RewardFunctionError(
            _OPTION, f"names module `{name}`, which is not found", "set run.user_path to the folder it is in"
        ) from error
    except Exception as error:  # a module of the user's may raise anything
        fact = f"names module `{name}`, whose import fails: {type(error).__name__}: {error}"
        raise RewardFunctionError(_OPTION, fact) from error


def _wanted_keywords(function: Callable[..., object], name: str) -> tuple[str, ...]:
    offered = RewardInput.__struct_fields__
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        by_name = parameter.name in offered and parameter.kind is not parameter.POSITIONAL_ONLY
        if required and not by_name:
            fact = f"names `{name}`, which wants an argument `{parameter.name}`"
            raise RewardFunctionError(_OPTION, fact, f"these are passed by name: {', '.join(offered)}")
    return tuple(parameter.name for parameter in parameters if parameter.name in offered)


def _call(function: Callable[..., object], wanted: tuple[str, ...], task: RewardInput) -> object:
    return function(**{name: getattr(task, name) for name in wanted})
