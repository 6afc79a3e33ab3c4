"""Writes a configuration as TOML that `settings.read` reads back to the same configuration."""

import json
from typing import Any

from launcher.fields import SECTIONS
from relax_actor.config import Config


def to_toml(config: Config) -> str:
    """Return every field of a configuration, defaults included, as TOML."""
    return "\n".join(_table(name, getattr(config, name)) for name in SECTIONS)


def _table(name: str, section: Any) -> str:
    lines = [f"{key} = {_value(getattr(section, key))}" for key in SECTIONS[name]]
    return "\n".join([f"[{name}]", *lines, ""])


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):  # a JSON string is a TOML basic string, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
