"""Rows of a JSONL file, read as a stream and checked one by one before anything starts.

A row that cannot be used is named by file, line and field. Imports neither torch nor transformers, so
that `--dry-run` can check a dataset in a moment.
"""

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.config import DataConfig
from relax_actor.errors import DatasetError

_BOM = b"\xef\xbb\xbf"
_WIRE_INTEGERS = range(-(2**63), 2**64)  # what MessagePack can carry


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One usable row."""

    prompt: str | list[dict[str, str]]
    """Text, or with template `chat` also a list of messages, each with `role` and `content`."""
    label: str
    """The reference answer; a number is kept as its JSON text; empty without `label_key`."""
    extra: dict[str, Any]
    """All other columns as JSON has them."""
    origin: str
    """`file:line`, lines counted from 1."""
    media: dict[str, npt.NDArray[Any]] = {}
    """The arrays under `media_key`: int64 where all numbers are whole, else float32."""


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """The usable rows of a file in its order, and why others are not among them."""

    rows: list[Row]
    skipped: list[str]
    """One reason a skipped row, with file, line and field."""


def load_dataset(config: DataConfig, *, path: str | None = None) -> Dataset:
    """Read and check every row.

    Args:
        config: names of the fields, template, and what to do with a bad row.
        path: another file of the same form, such as the evaluation set; `config.path` when None.

    Returns:
        At least one row.

    Raises:
        DatasetError: the file cannot be read or has no usable row; a bad row unless
            `config.on_bad_row` is `skip`.
    """
    name = config.path if path is None else path
    rows: list[Row] = []
    skipped: list[str] = []
    for number, line in _lines(name):
        try:
            rows.append(_row(line, config, origin=f"{name}:{number}"))
        except DatasetError as error:
            if config.on_bad_row == "error":
                raise
            skipped.append(str(error))
    if not rows:
        raise _no_rows(name, skipped)
    return Dataset(rows=rows, skipped=skipped)


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of every line that is not blank."""
    try:
        with Path(name).open("rb") as file:
            yield from _numbered(file)
    except OSError as error:
        raise DatasetError(name, f"cannot be read: {error.strerror}") from error


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, start=1):
        content = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if content:
            yield number, content


def _no_rows(name: str, skipped: list[str]) -> DatasetError:
    if not skipped:
        return DatasetError(name, "is empty", "one JSON object a line is expected")
    return DatasetError(
        name, f"has no usable row: all {len(skipped)} were skipped, the first because {skipped[0]}"
    )


def _row(line: bytes, config: DataConfig, *, origin: str) -> Row:
    fields = _object(line, origin)
    used = {config.prompt_key, config.label_key, config.media_key}
    extra = {key: value for key, value in fields.items() if key not in used}
    _check_extra(extra, origin)
    return Row(
        prompt=_prompt(fields, config, origin),
        label=_label(fields, config.label_key, origin) if config.label_key else "",
        extra=extra,
        origin=origin,
        media=_media(fields, config.media_key, origin) if config.media_key else {},
    )


def _object(line: bytes, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DatasetError(
            origin, f"is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}"
        ) from error
    except RecursionError as error:
        raise DatasetError(origin, "is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise DatasetError(origin, f"is not JSON: {error.msg} at column {error.pos + 1}") from error
    except ValueError as error:  # NaN and Infinity, or an integer of thousands of digits
        raise DatasetError(origin, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DatasetError(origin, f"is {_kind(value)}, not an object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_extra(extra: dict[str, Any], origin: str) -> None:
    for key, value in extra.items():
        if _has_big_integer(value):
            raise DatasetError(origin, f"has an integer beyond 64 bits in field `{key}`", "write it as text")


def _has_big_integer(value: Any) -> bool:
    pending = [value]  # not recursive: JSON may be nested deeper than Python may call
    while pending:
        item = pending.pop()
        if isinstance(item, int) and item not in _WIRE_INTEGERS:
            return True
        pending += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return False


def _prompt(fields: dict[str, Any], config: DataConfig, origin: str) -> str | list[dict[str, str]]:
    value = _field(fields, config.prompt_key, option="data.prompt_key", origin=origin)
    if config.template == "chat" and isinstance(value, list):
        return _messages(value, config.prompt_key, origin)
    wanted = "text or a list of messages" if config.template == "chat" else "text"
    if not isinstance(value, str):
        raise DatasetError(
            origin, f"has {_kind(value)} in field `{config.prompt_key}`, where {wanted} is wanted"
        )
    if not value.strip():
        raise DatasetError(origin, f"has an empty prompt in field `{config.prompt_key}`")
    return value


def _messages(value: list[Any], key: str, origin: str) -> list[dict[str, str]]:
    if not value:
        raise DatasetError(origin, f"has an empty list of messages in field `{key}`")
    for index, message in enumerate(value):
        if not _is_message(message):
            wanted = "an object with texts `role` and `content`"
            raise DatasetError(origin, f"has no message in `{key}[{index}]`, where {wanted} is wanted")
    if value[-1]["role"] == "assistant":
        raise DatasetError(
            origin, f"has nothing to answer in field `{key}`: the last message is the assistant's"
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _label(fields: dict[str, Any], key: str, origin: str) -> str:
    value = _field(fields, key, option="data.label_key", origin=origin)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != math.inf:
        return json.dumps(value)
    raise DatasetError(
        origin, f"has {_kind(value)} in field `{key}`, where text or a finite number is wanted"
    )


def _media(fields: dict[str, Any], key: str, origin: str) -> dict[str, npt.NDArray[Any]]:
    value = _field(fields, key, option="data.media_key", origin=origin)
    if not isinstance(value, dict):
        raise DatasetError(origin, f"has {_kind(value)} in field `{key}`, where an object is wanted")
    return {name: _array(numbers, f"{key}.{name}", origin) for name, numbers in value.items()}


def _array(numbers: Any, name: str, origin: str) -> npt.NDArray[Any]:
    try:
        array = np.array(numbers)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.dtype.kind not in "if":
        raise DatasetError(origin, f"has no array in `{name}`, where even nested lists of numbers are wanted")
    return array.astype(np.int64 if array.dtype.kind == "i" else np.float32)


def _field(fields: dict[str, Any], key: str, *, option: str, origin: str) -> Any:
    if key in fields:
        return fields[key]
    present = ", ".join(f"`{name}`" for name in fields) or "none"
    near = difflib.get_close_matches(key, fields, n=1)
    hint = f"set {option} to the name of the field" + (f", such as `{near[0]}`" if near else "")
    raise DatasetError(origin, f"has no field `{key}`; it has: {present}", hint)


def _kind(value: Any) -> str:
    kinds = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return kinds[type(value)]
