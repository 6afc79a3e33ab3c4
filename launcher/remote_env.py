"""What actors on other hosts start in: folder, interpreter, a script before them, variables. Byte for byte.

A value goes as it is from here into the environment there: nothing in it is expanded, quoted or split.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.options import RemoteOptions
from launcher.words import WordReader
from transport.ports import VARIABLE

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def remote(
    reader: WordReader, environ: Mapping[str, str], ports: tuple[int, int] | None = None
) -> RemoteOptions:
    """Read the options about the remote side.

    Args:
        reader: has the words; is told what is wrong.
        environ: where `-x NAME` takes its value from.
        ports: those that may be bound, if only some.
    """
    return RemoteOptions(
        workdir=_there(reader, "--workdir"),
        python=_python(reader),
        setup=_setup(reader),
        env=tuple((dict(_file(reader)) | dict(_given(reader, environ)) | port_variable(ports)).items()),
    )


def port_variable(ports: tuple[int, int] | None) -> dict[str, str]:
    """Return the variable that keeps everybody within a range of ports, if there is one."""
    return {VARIABLE: f"{ports[0]}-{ports[1]}"} if ports else {}


def _there(reader: WordReader, option: str) -> str:
    """Return an absolute path of the hosts; what is relative here may be something else there."""
    text = reader.text(option)
    if reader.is_given(option) and not text.startswith("/"):
        reader.complain(option, f"must be an absolute path on the hosts, got `{text}`")
    return text.rstrip("/") or text


def _python(reader: WordReader) -> str:
    venv, python = _there(reader, "--venv"), _there(reader, "--remote-python")
    if venv and python:
        reader.complain("--venv", "is given beside --remote-python", "leave one out")
    return f"{venv}/bin/python" if venv else python


def _setup(reader: WordReader) -> str:
    path = reader.here("--setup")
    return _text(reader, "--setup", path) if path else ""


def _file(reader: WordReader) -> Iterator[tuple[str, str]]:
    """Yield the variables of an environment file: NAME=VALUE a line, comments and blank lines left out."""
    path = reader.here("--env-file")
    if not path:
        return
    for number, line in enumerate(_text(reader, "--env-file", path).split("\n"), 1):
        name, equals, value = line.removesuffix("\r").partition("=")
        if not name.strip() or name.startswith("#"):
            continue
        if not equals or not _VARIABLE.fullmatch(name):
            hint = "a line is NAME=VALUE, without `export`; all behind the first `=` is the value"
            reader.complain(f"{path}:{number}", "has no variable", hint)
        elif "\0" in value:
            reader.complain(f"{path}:{number}", f"has a zero byte in the value of {name}")
        else:
            yield name, value


def _given(reader: WordReader, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for word in reader.texts("--env"):
        name, equals, value = word.partition("=")
        if not _VARIABLE.fullmatch(name):
            reader.complain("-x", "must be NAME or NAME=VALUE; a name has letters, digits and `_`")
        elif equals:
            yield name, value
        elif name in environ:
            yield name, environ[name]
        else:
            reader.complain(f"-x {name}", "is not set here", f"export {name} first, or give -x {name}=VALUE")


def _text(reader: WordReader, option: str, path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        reader.complain(option, f"cannot be read: {(error.strerror or str(error)).lower()}: {path}")
        return ""
