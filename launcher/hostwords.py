"""What stands in one line of a hostfile, word by word: hosts, and what may be said of them. Pure.

Each reader takes one word and returns its value, or raises `WordError` with where in the word the mistake is.
"""

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import msgspec

from launcher.fields import nearest
from launcher.hostlist import HostlistError, expand
from launcher.hosts import HostRole
from relax_actor.errors import RelaxError

MAX_SLOTS = 1024
"""More of one host is a typing mistake."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]*")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")
_GPU_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_GPU_UUID = re.compile(r"(?:GPU|MIG)-[A-Za-z0-9/-]+")


class WordError(RelaxError):
    """A word of a hostfile that cannot be used; see `hostlist.HostlistError` for the arguments."""

    def __init__(self, offset: int, fact: str, hint: str = "") -> None:
        self.offset, self.fact, self.hint = offset, fact, hint
        super().__init__(fact)


class HostWord(msgspec.Struct, frozen=True, kw_only=True):
    """The first word of a line."""

    names: tuple[str, ...]  # more than one where it has ranges
    user: str = ""
    slots: int | None = None  # behind a colon
    slots_at: int = 0  # where the colon is


def read_host(word: str) -> HostWord:
    """Read `[user@]host[:slots]`, where an IPv6 address is in brackets and a name may have ranges.

    Raises:
        WordError: it is no host.
    """
    user, at, host = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise WordError(0, f"has `{user}` where the user's name stands")
    start = len(user) + len(at)
    pattern, colon_at = _cut_slots(host, start)
    slots = read_slots(host[colon_at + 1 :], start + colon_at + 1) if colon_at >= 0 else None
    return HostWord(names=_names(pattern, start), user=user, slots=slots, slots_at=start + max(colon_at, 0))


def read_slots(text: str, offset: int = 0) -> int:
    """Read how many GPUs, or actors, a host takes: 1 to `MAX_SLOTS`."""
    return _number(text, offset, "slots", MAX_SLOTS, "leave it out, and the host is asked")


def read_gpus(text: str) -> tuple[str, ...]:
    """Read the GPUs of a host: indices and ranges of them, or UUIDs, which are not interpreted."""
    gpus: list[str] = []
    offset = 0
    for item in text.split(","):
        if _GPU_UUID.fullmatch(item):
            gpus.append(item)
        else:
            gpus += _gpu_range(item, offset)
        offset += len(item) + 1
    if len(set(gpus)) < len(gpus):
        raise WordError(0, "names a GPU twice")
    if len({gpu.isdigit() for gpu in gpus}) > 1:
        raise WordError(0, "has numbers beside UUIDs", "CUDA takes either in one list, not both")
    return tuple(gpus)


def read_address(text: str) -> str:
    """Read an IP address, in brackets or not, or a name."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in inner and _is_ipv6(inner):
        return inner
    _check_name(text, 0)
    return text


def read_role(text: str) -> HostRole:
    """Read what a host is reserved for."""
    roles = [role.value for role in HostRole]
    if text not in roles:
        close = nearest(text, roles)
        hint = f"did you mean role={close}?" if close else f"role= is one of {', '.join(roles)}"
        raise WordError(0, f"`{text}` is not a role", hint)
    return HostRole(text)


KEYS: dict[str, Callable[[str], Any]] = {
    "slots": read_slots,
    "gpus": read_gpus,
    "port": lambda text: _number(text, 0, "port", 65_535),
    "user": lambda text: _matching(text, _USER, "the name of a user"),
    "addr": read_address,
    "ifname": lambda text: _matching(text, _INTERFACE, "the name of a network interface"),
    "role": read_role,
    "max_slots": read_slots,
    "binding": lambda text: text,
}
"""How the value of each key is read. The last two, of Open MPI and MPICH, are read and not used."""


def _cut_slots(host: str, start: int) -> tuple[str, int]:
    """Return what stands before `:slots`, and where that colon is, or -1."""
    if host.startswith("[") and ":" in host.partition("]")[0]:
        address, closed, rest = host[1:].partition("]")
        if not closed:
            raise WordError(start, "has `[` without `]`")
        if rest and rest[0] != ":":
            raise WordError(start + len(address) + 2, f"has `{rest}` behind an address")
        return host[: len(address) + 2], len(address) + 2 if rest else -1
    if host.count(":") > 1:
        hint = f"an IPv6 address is in brackets: [{host}]" if _is_ipv6(host) else "host:slots has one"
        raise WordError(start, "has more than one colon", hint)
    colon = host.find(":")
    return (host, -1) if colon < 0 else (host[:colon], colon)


def _names(pattern: str, start: int) -> tuple[str, ...]:
    if pattern.startswith("[") and ":" in pattern:
        if not _is_ipv6(pattern[1:-1]):
            raise WordError(start, f"has `{pattern}`, which is no IPv6 address")
        return (str(IPv6Address(pattern[1:-1])),)
    try:
        names = expand(pattern) or [""]
    except HostlistError as error:
        raise WordError(start + error.offset, error.fact, error.hint) from None
    for name in names:
        _check_name(name, start)
    return tuple(names)


def _check_name(name: str, offset: int) -> None:
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, `.`, `_` and `-`, a letter or digit first and last"
        raise WordError(offset, f"has `{name}`, which is no name of a host", allowed)
    if re.fullmatch(r"[0-9.]+", name) and not _is_ipv4(name):
        raise WordError(offset, f"has `{name}`, which is no IPv4 address")


def _gpu_range(item: str, offset: int) -> list[str]:
    match = _GPU_RANGE.fullmatch(item)
    if not match:
        fact = f"has `{item}` where a GPU stands" if item else "names no GPU"
        raise WordError(offset, fact, "indices such as 0,2,4-7, or UUIDs as `nvidia-smi -L` prints them")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise WordError(offset, f"has the range {item}, which runs backwards", f"write {last}-{first}")
    return [str(index) for index in range(first, last + 1)]


def _number(text: str, offset: int, name: str, most: int, hint: str = "") -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise WordError(offset, f"{name} must be a whole number, got `{text}`", hint)
    if not 1 <= int(text) <= most:
        raise WordError(offset, f"{name} must be 1 to {most}, got {text}", hint)
    return int(text)


def _matching(text: str, form: re.Pattern[str], what: str) -> str:
    if not form.fullmatch(text):
        raise WordError(0, f"`{text}` is not {what}")
    return text


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return text.isascii() and text.isprintable() and " " not in text
