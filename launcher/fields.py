"""What fields the configuration has: their names, types and nearest names.

Everything that reads, checks or writes a configuration asks here, so that a new field of
`relax_actor.config` is known everywhere at once.
"""

import difflib
import json
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import msgspec

from relax_actor.config import Config

Name = tuple[str, str]
"""Section and key, such as ("train", "learning_rate")."""


def _fields_of(record: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(record)}


SECTIONS: dict[str, dict[str, msgspec.structs.FieldInfo]] = {
    name: _fields_of(field.type) for name, field in _fields_of(Config).items()
}
"""Section -> key -> field, in the order of the record."""

PATHS: frozenset[Name] = frozenset(
    {
        ("run", "dir"),
        ("run", "resume"),
        ("run", "user_path"),
        ("model", "path"),
        ("data", "path"),
        ("data", "prefix_path"),
        ("queue", "storage_path"),
        ("eval", "path"),
    }
)
"""Fields that name a file or folder; `run.resume` only where it is neither `auto` nor `none`."""

OPTIONAL_PATHS: frozenset[Name] = frozenset({("run", "user_path"), ("data", "prefix_path"), ("eval", "path")})
"""Those that may be empty."""


def dotted(name: Name) -> str:
    """Return `section.key`."""
    return ".".join(name)


def normalized(word: str) -> str:
    """Return a section or key with underscores, as the record spells it."""
    return word.strip().replace("-", "_")


def wanted(kind: Any) -> str:
    """Say in words what a field of this type takes."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(kind))
    if origin is tuple:
        return _wanted_tuple(get_args(kind))
    if origin is dict:
        return "a table of texts"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, str(kind))


def shown(value: Any) -> str:
    """Return a value as it would be written in TOML or on a command line, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def parse(text: str, kind: Any) -> Any:
    """Turn the text of an override into a field's type.

    Args:
        text: what stands behind the equals sign; a tuple is a JSON list or separated by commas, a table a
            JSON object.
        kind: the field's annotation.

    Raises:
        ValueError: the text is not of that type; `1e-6` is a number, `2.5` not a whole one.
    """
    if get_origin(kind) is tuple:
        items = _items(text)
        return msgspec.convert(items, kind, strict=all(not isinstance(item, str) for item in items))
    if kind is str:
        return text
    if get_origin(kind) is dict:
        return msgspec.convert(json.loads(text), kind)
    return msgspec.convert(text.strip(), kind, strict=False)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name most like a word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def suggestion(section: str, key: str) -> str:
    """Return a hint for a setting that does not exist."""
    if section not in SECTIONS:
        close = nearest(section, SECTIONS)
        known = ", ".join(SECTIONS)
        return f"did you mean `{close}`?" if close else f"the sections are {known}"
    if close := nearest(key, SECTIONS[section]):
        return f"did you mean `{section}.{close}`?"
    if close := nearest(key, [other for fields in SECTIONS.values() for other in fields]):
        homes = [home for home in SECTIONS if close in SECTIONS[home]]
        return "did you mean " + " or ".join(f"`{home}.{close}`" for home in homes) + "?"
    return f"[{section}] has {', '.join(SECTIONS[section])}"


def _wanted_tuple(kinds: tuple[Any, ...]) -> str:
    plurals = {int: "whole numbers", float: "numbers", str: "texts"}
    many = plurals.get(kinds[0], str(kinds[0]))
    return f"a list of {many}" if kinds[-1] is Ellipsis else f"a list of {len(kinds)} {many}"


def _items(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [item.strip() for item in text.split(",")] if text.strip() else []
