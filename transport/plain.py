"""One step from a Python object towards what MessagePack has types for; pure."""

import dataclasses
import enum
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import msgspec


def plain(item: Any) -> Any:
    """Replace an object by a plainer one whose parts are left as they are.

    Struct and dataclass become dict, Enum its value, tuple and set list, Path str, a NumPy scalar a
    number, and a subclass of a builtin type that builtin.

    Raises:
        TypeError: nothing plainer stands for it.
    """
    if isinstance(item, msgspec.Struct):
        return _plain_struct(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    if isinstance(item, enum.Enum):
        return item.value
    if isinstance(item, pathlib.PurePath):
        return os.fspath(item)
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(item, numpy.generic):
        return _plain_scalar(item)
    return _plain_builtin(item)


def children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value and the path step to each: `.key`, `[3]`, or `{key}` for a key itself."""
    if not isinstance(value, dict | list):
        try:
            value = plain(value)
        except TypeError:
            return
    if isinstance(value, dict):
        yield from ((f"{{{key!r}}}", key) for key in value)
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, list):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))


def _plain_struct(struct: msgspec.Struct) -> Any:
    config, names = struct.__struct_config__, struct.__struct_encode_fields__
    values = [getattr(struct, field) for field in struct.__struct_fields__]
    if config.array_like:
        return values if config.tag is None else [config.tag, *values]
    tag = {} if config.tag is None else {config.tag_field: config.tag}
    return tag | dict(zip(names, values, strict=True))


def _plain_scalar(scalar: Any) -> Any:
    value = scalar.item()
    if type(value).__module__ == "numpy" or not isinstance(value, bool | int | float | str | bytes):
        raise TypeError(f"a NumPy scalar of dtype {scalar.dtype} has no plain counterpart")
    return value


def _plain_builtin(item: Any) -> Any:
    if isinstance(item, tuple | set | frozenset | list):
        return list(item)
    if isinstance(item, dict):
        return dict(item)
    for builtin in (str, int, float, bytes):
        if isinstance(item, builtin) and type(item) is not builtin:
            return _downcast(item, builtin)
    if isinstance(item, int):
        raise TypeError("integers have 64 bits on the wire, and this one is beyond them")
    raise TypeError("no plain value stands for this type")


def _downcast(item: Any, builtin: Any) -> Any:
    """Copy a subclass instance into its builtin, past whatever conversions the subclass overrides."""
    if builtin in (str, bytes):
        return builtin().join([item])
    return builtin.__pos__(item)
