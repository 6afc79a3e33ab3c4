"""Hostfiles: which hosts there are, one a line, in a form that contains Open MPI's, DeepSpeed's and MPICH's.

    # comments, trailing comments, blank lines, CRLF and a byte order mark are fine
    node01 slots=8
    ubuntu@node02 slots=8 port=2222 addr=10.0.0.2 ifname=eth0
    node[03-06,09] slots=8 role=rollout
    gpu-a gpus=0,2,4-7
    [fd00::12]:8

Everything that is wrong is found before anything is reported; each problem says file:line:column and shows
the line with a caret below the mistake. `read` alone touches a file; the rest is pure.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.errors import RefusedError
from launcher.fields import nearest
from launcher.hostlist import split
from launcher.hosts import HostEntry
from launcher.hostwords import KEYS, HostWord, WordError, read_host
from relax_actor.errors import ConfigError

_WORD = re.compile(r"[^ \t]+")
_FIELD_OF = {"addr": "address", "ifname": "interface"}
_EXCERPT = 70
"""Characters of a line that an error shows; the mistake is among them."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a hostfile, or in an option that stands for one."""

    source: str
    line: int  # from 1; 0 where the source has no lines
    text: str  # that line
    offset: int = 0

    def at(self, offset: int) -> "Place":
        """Return another place in the line."""
        return msgspec.structs.replace(self, offset=offset)

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.offset + 1}" if self.line else self.source


class HostLineError(ConfigError):
    """One mistake in a hostfile.

    Args:
        place: where it is.
        fact: what is wrong.
        hint: what to do about it.
    """

    def __init__(self, place: Place, fact: str, hint: str = "") -> None:
        self.place = place
        super().__init__(str(place), fact, hint)

    def __str__(self) -> str:
        head, blank, hint = super().__str__().partition("\n\n")
        start = max(0, self.place.offset - _EXCERPT // 2)
        shown = self.place.text[start : start + _EXCERPT].replace("\t", " ")
        shown = "".join(char if char.isprintable() else "?" for char in shown)
        return f"{head}\n  {shown}\n  {' ' * (self.place.offset - start)}^{blank}{hint}"


class HostfileError(RefusedError):
    """A hostfile that cannot be used; `problems` has all that is wrong with it."""


def read(path: Path) -> tuple[HostEntry, ...]:
    """Read a hostfile.

    Raises:
        HostfileError: it cannot be read, or something in it is wrong.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        hint = "nothing is launched without it: give another -H, or leave it out to run on this host alone"
        raise HostfileError([ConfigError(str(path), "is no hostfile: it does not exist", hint)]) from None
    except OSError as error:
        raise HostfileError([ConfigError(str(path), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        fact = f"is not text: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise HostfileError([ConfigError(str(path), fact, "a hostfile is UTF-8")]) from None
    return parse(text, str(path))


def parse(text: str, source: str = "hostfile") -> tuple[HostEntry, ...]:
    """Return the hosts of a hostfile's text, ranges expanded, in its order.

    Args:
        text: with or without a byte order mark; lines end in LF or CRLF.
        source: what errors call it.

    Raises:
        HostfileError: something in it is wrong.
    """
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        words = [(match.start(), match[0]) for match in _WORD.finditer(line.partition("#")[0])]
        if words:
            reader.take(Place(source=source, line=number, text=line), words)
    return reader.finish(Place(source=source, line=1, text=lines[0]))


def parse_hosts(text: str, source: str = "--hosts") -> tuple[HostEntry, ...]:
    """Return the hosts of a list such as `a:8,b:8`.

    Raises:
        HostfileError: something in it is wrong.
    """
    reader, place = _Reader(), Place(source=source, line=0, text=text)
    for word in split(text):
        reader.take(place, [word])
    return reader.finish(place)


def render(hosts: Iterable[HostEntry]) -> str:
    """Return hosts as a hostfile that reads back to the same hosts."""
    return "".join(" ".join(_words(host)) + "\n" for host in hosts)


Said = dict[str, tuple[int, Any]]
"""What a line says: key -> where in the line, and the value."""


class _Reader:
    """Collects the hosts of one source, and what is wrong with it."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostEntry] = {}
        self._places: dict[str, Place] = {}
        self._problems: list[HostLineError] = []

    def take(self, line: Place, words: Sequence[tuple[int, str]]) -> None:
        """Take a host and what is said of it; words come with their offset in the line."""
        (at, first), *rest = words
        try:
            host = read_host(first)
        except WordError as error:
            self._complain(line.at(at + error.offset), error.fact, error.hint)
            return
        said = self._said(line, rest)
        if host.slots is not None:
            said = {":n": (at + host.slots_at, host.slots)} | said
        self._check(line, host, said)
        self._add(line.at(at), host, {key: value for key, (_, value) in said.items()})

    def finish(self, start: Place) -> tuple[HostEntry, ...]:
        """Return the hosts, or raise what is wrong; `start` is where the source begins."""
        if not self._hosts and not self._problems:
            self._complain(start, "names no host", "one host a line, for example node01 slots=8")
        self._check_loopback()
        if self._problems:
            self._problems.sort(key=lambda problem: (problem.place.line, problem.place.offset))
            raise HostfileError(self._problems)
        return tuple(self._hosts.values())

    def _said(self, line: Place, words: Sequence[tuple[int, str]]) -> Said:
        """Read the words of the form `key=value`."""
        said: Said = {}
        for at, word in words:
            spelled, equals, text = word.partition("=")
            key = spelled.lower().replace("-", "_")
            if problem := _key_problem(word, key, said):
                self._complain(line.at(at), *problem)
                if not (equals and text and key):
                    break  # what follows a word that is out of place is, too
                continue
            try:
                said[key] = (at, KEYS[key](text))
            except WordError as error:
                self._complain(line.at(at + len(spelled) + 1 + error.offset), error.fact, error.hint)
        return said

    def _check(self, line: Place, host: HostWord, said: Said) -> None:
        """Refuse what contradicts itself in one line."""
        counts = [key for key in (":n", "slots", "gpus") if key in said]
        if len(counts) > 1:
            fact = f"has {' and '.join(f'`{key}`' for key in counts)}"
            self._complain(line.at(said[counts[1]][0]), fact, "one of them says how many there are")
        if host.user and "user" in said:
            self._complain(line.at(said["user"][0]), "has `user@` and `user`", "leave one out")
        if len(host.names) > 1 and "addr" in said:
            fact = f"gives one address to {len(host.names)} hosts"
            self._complain(line.at(said["addr"][0]), fact, "give each host a line of its own")

    def _add(self, place: Place, host: HostWord, said: dict[str, Any]) -> None:
        fields = {_FIELD_OF.get(key, key): value for key, value in said.items()}
        common = {"user": host.user, "slots": fields.get(":n"), "where": str(place)} | fields
        known: dict[str, Any] = {
            field: value for field, value in common.items() if field in HostEntry.__struct_fields__
        }
        for name in host.names:
            key = name.lower()
            if before := self._places.get(key):
                fact = f"names {name} again" + (f", which is in line {before.line}" if before.line else "")
                self._complain(place, fact, "a host has one line: add up its slots")
                return
            self._places[key] = place
            self._hosts[key] = HostEntry(name=name, **known)

    def _check_loopback(self) -> None:
        """Refuse a name that means another host on every host."""
        far = [host for host in self._hosts.values() if not host.is_loopback]
        here = [key for key, host in self._hosts.items() if host.is_here]
        for key, host in self._hosts.items():
            if far and host.is_loopback and not host.address:
                fact = f"has {host.name} beside {far[0].name}, for which it is another host"
                hint = "write this host's own name, or addr= with the address that others reach it by"
                self._complain(self._places[key], fact, hint)
            elif key in here[1:]:
                fact = f"has {host.name}, which is {self._hosts[here[0]].name} again"
                self._complain(self._places[key], fact, "leave one out")

    def _complain(self, place: Place, fact: str, hint: str = "") -> None:
        self._problems.append(HostLineError(place, fact, hint))


def _key_problem(word: str, key: str, said: Said) -> tuple[str, str] | None:
    """Return what is wrong with a word before its value is read, and a hint."""
    _, equals, text = word.partition("=")
    if not key or (equals and not text) or (not equals and key in KEYS):
        return "has spaces around `=`, or nothing beside it", "for example slots=8"
    if not equals:
        hint = (
            f"did you mean slots={word}?"
            if word.isdigit()
            else "one host a line, then words of the form key=value"
        )
        return f"has `{word}`, which is not of the form key=value", hint
    if key not in KEYS:
        close = nearest(key, KEYS)
        return f"has `{key}`, which is no key", f"did you mean {close}=?" if close else _known_keys()
    if key in said:
        return f"has `{key}` twice", "leave one out"
    return None


def _known_keys() -> str:
    return f"the keys are {', '.join(KEYS)}"


def _words(host: HostEntry) -> Iterable[str]:
    yield f"[{host.name}]" if ":" in host.name else host.name
    values = {
        "user": host.user,
        "slots": host.slots,
        "gpus": ",".join(host.gpus) if host.gpus else "",
        "port": host.port,
        "addr": host.address,
        "ifname": host.interface,
        "role": host.role,
    }
    for key, value in values.items():
        if value:
            yield f"{key}={value}"
