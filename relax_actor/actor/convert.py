"""Arguments and results between plain values on the wire and the types a method is annotated with."""

import inspect
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec


class Signature:
    """An endpoint's parameter and return types, resolved once."""

    def __init__(self, method: Callable[..., Any]) -> None:
        hints = _hints(method)
        self.returns = hints.get("return", Any)
        self._signature = inspect.signature(method)
        self._hints = hints

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Convert received arguments to their annotated types.

        Raises:
            TypeError: the arguments do not fit the signature.
            msgspec.ValidationError: one has another type; says which, at `$.path`.
        """
        bound = self._signature.bind(None, *args, **kwargs)  # None stands for self
        for name, value in bound.arguments.items():
            bound.arguments[name] = self._convert_parameter(name, value)
        return list(bound.args[1:]), bound.kwargs

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
