"""Arguments and results between plain values on the wire and the types a method is annotated with."""

import inspect
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

_PLAIN = frozenset({int, float, str, bytes, bool, dict, list})
"""Types whose values are what they are; of their parts no type is promised."""


class Signature:
    """An endpoint's parameter and return types, resolved once."""

    def __init__(self, method: Callable[..., Any]) -> None:
        hints = _hints(method)
        self.returns = hints.get("return", Any)
        self._signature = inspect.signature(method)
        self._hints = hints
        self._positional = self._simple_hints()

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Convert received arguments to their annotated types.

        Raises:
            TypeError: the arguments do not fit the signature.
            msgspec.ValidationError: one has another type; says which, at `$.path`.
        """
        if not kwargs and self._positional is not None and len(args) == len(self._positional):
            return list(map(convert, args, self._positional)), kwargs
        bound = self._signature.bind(None, *args, **kwargs)  # None stands for self
        for name, value in bound.arguments.items():
            bound.arguments[name] = self._convert_parameter(name, value)
        return list(bound.args[1:]), bound.kwargs

    def _simple_hints(self) -> tuple[Any, ...] | None:
        """Return the types of all parameters where each may be passed by its position."""
        parameters = list(self._signature.parameters.values())[1:]  # without self
        simple = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if any(each.kind not in simple for each in parameters):
            return None
        return tuple(self._hints.get(each.name, Any) for each in parameters)

    def _convert_parameter(self, name: str, value: Any) -> Any:
        hint = self._hints.get(name, Any)
        match self._signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                return tuple(convert(item, hint) for item in value)
            case inspect.Parameter.VAR_KEYWORD:
                return {key: convert(item, hint) for key, item in value.items()}
            case _:
                return convert(value, hint)


@lru_cache(maxsize=1024)
def signature_of(method: Callable[..., Any]) -> Signature:
    """Return the resolved signature of a method, taken from its class."""
    return Signature(method)


def convert(value: Any, hint: Any) -> Any:
    """Convert a value off the wire to `hint`; arrays and what msgspec does not know pass as they are."""
    if type(value) is hint and hint in _PLAIN:
        return value
    if hint is Any or hint is inspect.Parameter.empty or _is_array(value):
        return value
    try:
        return msgspec.convert(value, hint, dec_hook=_accept)
    except TypeError:  # a type msgspec cannot describe, such as an annotated array
        return value


def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(method)
    except NameError:  # an annotation under TYPE_CHECKING: values pass as they are
        return {}


def _accept(_hint: type, value: Any) -> Any:
    return value


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in {"numpy", "torch"}
