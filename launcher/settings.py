"""Reads a run's configuration: a TOML file, `section.key=value` overrides and the flags people know.

What comes later wins: defaults, file, overrides, flags. Every problem is found before any is reported;
each names the option and, where a file says it, file:line. Paths in a file are relative to that file,
paths of the command line to the current folder.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.errors import RefusedError
from launcher.fields import (
    OPTIONAL_PATHS,
    PATHS,
    SECTIONS,
    Name,
    dotted,
    nearest,
    normalized,
    parse,
    shown,
    suggestion,
    wanted,
)
from relax_actor.config import Config
from relax_actor.errors import ConfigError

FLAGS: dict[str, Name] = {
    "--mode": ("run", "mode"),
    "--model": ("model", "path"),
    "--dataset": ("data", "path"),
    "--steps": ("run", "steps"),
    "--global-batch-size": ("train", "global_batch_size"),
    "--micro-batch-size": ("train", "micro_batch_size"),
    "--resume": ("run", "resume"),
    "--run-dir": ("run", "dir"),
    "--grace": ("run", "grace_s"),
    "--partial-rollout": ("rollout", "chunk_tokens"),
    "--mode colocate": ("run", "colocate"),
}
"""Short ways to say the fields that most runs set."""

_REQUIRED: dict[Name, str] = {("model", "path"): "--model", ("data", "path"): "--dataset"}


class Setting(msgspec.Struct, frozen=True):
    """One value, and who said so."""

    value: Any
    label: str  # what an error calls it: `--steps`, `run.steps` or `run.steps (run.toml:3)`


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration and where each of its values was said."""

    config: Config
    given: dict[Name, Setting]

    def where(self, option: str) -> str:
        """Return what an error calls `section.key`."""
        section, _, key = option.partition(".")
        setting = self.given.get((section, key))
        return setting.label if setting else option


def load(
    config_path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, str | None] | None = None
) -> Config:
    """Read a configuration; see `read`."""
    return read(config_path, overrides, flags).config


def read(
    config_path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, str | None] | None = None
) -> Settings:
    """Read a configuration and remember who said what.

    Args:
        config_path: a TOML file, or nothing where flags or overrides say all that is needed.
        overrides: `section.key=value`; dashes count as underscores.
        flags: keys of `FLAGS` with the text given; None where a flag was not given.

    Raises:
        RefusedError: what is wrong, everything at once.
    """
    said = _Said()
    if config_path:
        _read_file(said, config_path)
    for override in overrides:
        _read_override(said, override)
    for flag, text in (flags or {}).items():
        if text is not None and not (flag == "--partial-rollout" and said.chunks):
            said.take(FLAGS[flag], text, flag)
    _complete(said, config_path)
    if said.problems:
        raise RefusedError(said.problems)
    return Settings(config=_build(said.given), given=said.given)


class _Said:
    """What has been said so far, and what was wrong with it."""

    def __init__(self) -> None:
        self.given: dict[Name, Setting] = {}
        self.problems: list[ConfigError] = []
        self.unreadable = False

    def take(self, name: Name, value: Any, label: str, base: Path | None = None) -> None:
        """Add one value, or what is wrong with it; `base` is the folder of the file it stands in."""
        section, key = name
        field = SECTIONS.get(section, {}).get(key)
        if field is None:
            self.complain(label, "is not a setting", suggestion(section, key))
            return
        try:
            typed = parse(value, field.type) if base is None else msgspec.convert(value, field.type)
        except ValueError:
            self.problems.append(_mistyped(label, value, field.type))
            return
        if name in PATHS and not _may_be_path(name, typed):
            self.complain(label, f"must be a path, got {shown(typed)}")
            return
        self.given[name] = Setting(_resolved(name, typed, base or Path()), label)

    @property
    def chunks(self) -> bool:
        """Whether it was said how often unfinished samples are put; a switch does not overrule a number."""
        setting = self.given.get(("rollout", "chunk_tokens"))
        return setting is not None and setting.value > 0

    def is_unknown(self, name: Name) -> bool:
        """Whether a value was given but not understood, or may stand in a file that cannot be read."""
        return self.unreadable or any(dotted(name) in problem.where for problem in self.problems)

    def complain(self, where: str, fact: str, hint: str = "") -> None:
        """Add a problem."""
        self.problems.append(ConfigError(where, fact, hint))


def _read_file(said: _Said, path: Path) -> None:
    try:
        text = path.read_text("utf-8-sig")
        tables = tomllib.loads(text)
    except (OSError, ValueError) as error:
        said.problems.append(_unreadable(path, error))
        said.unreadable = True
        return
    lines = _lines(text)
    for section, table in tables.items():
        _read_table(said, path, (normalized(section), table), lines)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(str(path), "does not exist")
    if isinstance(error, OSError):
        return ConfigError(str(path), f"cannot be read: {error.strerror}")
    at = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
    where = f"{path}:{at[1]}:{at[2]}" if at else str(path)
    return ConfigError(where, f"is not TOML: {str(error)[: at.start()] if at else error}")


def _read_table(said: _Said, path: Path, entry: tuple[str, Any], lines: Mapping[Name, int]) -> None:
    section, table = entry
    line = lines.get((section, ""), 1)
    if section not in SECTIONS:
        said.complain(f"{section} ({path}:{line})", "is not a section", suggestion(section, ""))
        return
    if not isinstance(table, dict):
        fact = f"is a section, not a value; got {shown(table)}"
        said.complain(f"{section} ({path}:{line})", fact, f"write a table: [{section}]")
        return
    for key, value in table.items():
        name = (section, normalized(key))
        said.take(name, value, f"{dotted(name)} ({path}:{lines.get(name, line)})", base=path.parent)


def _read_override(said: _Said, override: str) -> None:
    option, equals, text = override.partition("=")
    section, dot, key = (normalized(word) for word in option.partition("."))
    if equals and dot and key:
        said.take((section, key), text, f"{section}.{key}")
        return
    close = nearest(section, [field for fields in SECTIONS.values() for field in fields])
    homes = [home for home in SECTIONS if close in SECTIONS[home]]
    example = f"{homes[0]}.{close}" if homes else "train.learning_rate"
    said.complain(override, "is not of the form section.key=value", f"for example {example}=VALUE")


def _mistyped(label: str, value: Any, kind: Any) -> ConfigError:
    words = wanted(kind)
    close = nearest(str(value), re.findall("`(.+?)`", words))
    hint = f"did you mean `{close}`?" if close else ""
    if isinstance(value, str) and kind in (int, float, bool) and _parses(value, kind):
        hint = f"write it without quotes: {value}"
    return ConfigError(label, f"must be {words}, got {shown(value)}", hint)


def _parses(text: str, kind: Any) -> bool:
    try:
        parse(text, kind)
    except ValueError:
        return False
    return True


def _may_be_path(name: Name, text: str) -> bool:
    return "\0" not in text and (bool(text.strip()) or (name in OPTIONAL_PATHS and not text))


def _resolved(name: Name, value: Any, base: Path) -> Any:
    if name not in PATHS or not value or (name == ("run", "resume") and is_no_path(value)):
        return value
    return str((base / Path(value).expanduser()).absolute())


def is_no_path(resume: str) -> bool:
    """Whether `run.resume` is a word or a step, to be looked for in the run folder."""
    return resume in {"auto", "none"} or (resume.isascii() and resume.isdecimal())


def _complete(said: _Said, config_path: Path | None) -> None:
    """Fill in what follows from other values, and find contradictions."""
    for name, flag in _REQUIRED.items():
        if name not in said.given and not said.is_unknown(name):
            said.complain(dotted(name), "is required", f"give {flag} PATH, or set it in a file")
    _complete_staleness(said)
    _complete_micro_batch(said.given)
    _complete_user_path(said.given, config_path)


def _complete_staleness(said: _Said) -> None:
    mode, staleness = said.given.get(("run", "mode")), said.given.get(("run", "max_staleness"))
    if mode and mode.value == "async_on_policy":
        if staleness is None:
            said.given["run", "max_staleness"] = Setting(0, mode.label)
        elif staleness.value != 0:
            fact = f"is {staleness.value}, but `{mode.label}` is async_on_policy, which means 0"
            said.complain(staleness.label, fact, "leave one of the two out")
    elif staleness and staleness.value == 0:
        fact = "is 0, but mode async_off_policy needs 1 or more"
        said.complain(staleness.label, fact, "run.mode=async_on_policy is the mode with staleness 0")


def _complete_micro_batch(given: dict[Name, Setting]) -> None:
    """Shrink the default micro-batch, not one somebody asked for, to the samples of one update."""
    batch = given.get(("train", "global_batch_size"))
    if batch and ("train", "micro_batch_size") not in given:
        updates = given.get(("train", "updates_per_batch"), Setting(1, "")).value
        share = max(1, batch.value // max(1, updates))
        default = SECTIONS["train"]["micro_batch_size"].default
        given["train", "micro_batch_size"] = Setting(min(default, share), "train.micro_batch_size")


def _complete_user_path(given: dict[Name, Setting], config_path: Path | None) -> None:
    """Let `module:function` be found beside the configuration, or in the current folder."""
    function = given.get(("reward", "function"))
    if function and ":" in function.value and ("run", "user_path") not in given:
        folder = config_path.parent if config_path else Path()
        given["run", "user_path"] = Setting(str(folder.absolute()), "run.user_path")


def _build(given: Mapping[Name, Setting]) -> Config:
    tables: dict[str, dict[str, Any]] = {}
    for (section, key), setting in given.items():
        tables.setdefault(section, {})[key] = setting.value
    return msgspec.convert(tables, Config)


_TABLE = re.compile(r"""\s*\[+\s*["']?([\w-]+)["']?\s*\]+\s*(#.*)?$""")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*(?:\.\s*["']?([\w-]+)["']?\s*)?=""")


def _lines(text: str) -> dict[Name, int]:
    """Return the line, from 1, of every (section, key), and of every section as (section, "")."""
    found: dict[Name, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if table := _TABLE.match(line):
            section = normalized(table[1])
            found.setdefault((section, ""), number)
        elif key := _KEY.match(line):
            words = (section, key[1]) if section else (key[1], key[2] or "")
            found.setdefault((normalized(words[0]), normalized(words[1])), number)
            found.setdefault((normalized(words[0]), ""), number)
    return found
