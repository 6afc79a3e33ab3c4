"""One type for every place a message can be sent to, so that nothing else ever splits a string at a colon.

ipc:///run/relax/queue-1.sock      an AF_UNIX socket; the folder's permissions are its protection
tcp://node7:0, tcp://[fe80::1%eth0]:5555     between hosts; port 0 is any free one
loop://queue                       inside one process, for tests
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from transport.errors import AddressError

UNIX_PATH_LIMIT_BYTES: Final = 107
"""sun_path of unix(7) has 108 bytes, one of which ends the string."""

Scheme = Literal["ipc", "tcp", "loop"]

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_BRACKETED: Final = re.compile(r"\[([^\[\]]*)\]:([^:]*)")
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True)
class Address:
    """Where a listener is; made by `parse`, `ipc`, `tcp` or `loop`, which check it.

    Args:
        scheme: how to get there.
        host: `tcp`: a name, an IPv4 or a bare IPv6 address with or without zone; `loop`: the name.
        port: `tcp`: 1 to 65535, or 0 for any free one; else 0.
        path: `ipc`: an absolute path; else empty.
    """

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read what `str(address)` wrote.

        Raises:
            AddressError: names the text, what is wrong with it and what to write instead.
        """
        scheme, separator, rest = text.partition("://")
        if separator and scheme == "ipc":
            return cls.ipc(Path(rest))
        if separator and scheme == "loop":
            return cls.loop(rest)
        if separator and scheme == "tcp":
            return cls.tcp(*_split_host_port(text, rest))
        raise AddressError(text, "has no known scheme", "write ipc://, tcp:// or loop:// before it")

    @classmethod
    def ipc(cls, path: Path) -> "Address":
        """Name an AF_UNIX socket.

        Raises:
            AddressError: the path is relative, has a NUL, is no UTF-8, or is longer than 107 bytes.
        """
        address = cls("ipc", path=str(path))
        length_bytes = len(str(path).encode(errors="replace"))
        if not path.is_absolute() or not _is_text(str(path)):
            raise AddressError(str(address), "needs an absolute path in UTF-8, as in ipc:///run/x.sock")
        if length_bytes > UNIX_PATH_LIMIT_BYTES:
            raise AddressError(
                str(address),
                f"has a path of {length_bytes} bytes, and the kernel allows {UNIX_PATH_LIMIT_BYTES}",
                "choose a shorter folder for sockets, such as one below $XDG_RUNTIME_DIR",
            )
        return address

    @classmethod
    def tcp(cls, host: str, port: int = 0) -> "Address":
        """Name a port of a host; port 0 is any free one.

        Raises:
            AddressError: the host is no name and no address, or the port is out of range.
        """
        address = cls("tcp", host=host, port=port)
        if not 0 <= port <= 65535:
            raise AddressError(str(address), "has a port outside of 0 to 65535")
        if host == "*":
            raise AddressError(str(address), "has a wildcard host", "write 0.0.0.0, or [::] for IPv6 too")
        if not (_is_ip(host) or (len(host) <= 253 and _NAME.fullmatch(host) and not _looks_like_ipv4(host))):
            raise AddressError(str(address), "has a host that is neither a name nor an IP address")
        return address

    @classmethod
    def loop(cls, name: str) -> "Address":
        """Name a listener of a `LoopbackNetwork`.

        Raises:
            AddressError: the name is empty or has other than letters, digits, `.`, `-` and `_`.
        """
        address = cls("loop", host=name)
        if not _NAME.fullmatch(name):
            raise AddressError(str(address), "needs a name of letters, digits, `.`, `-` and `_`")
        return address

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is a literal IPv6 address."""
        return self.scheme == "tcp" and ":" in self.host

    def with_port(self, port: int) -> "Address":
        """Return the same host at another port.

        Raises:
            AddressError: the port is out of range, or this is no `tcp` address.
        """
        if self.scheme != "tcp":
            raise AddressError(str(self), "has no port")
        return Address.tcp(self.host, port)

    def __str__(self) -> str:
        if self.scheme == "tcp":
            host = f"[{self.host}]" if self.is_ipv6 else self.host
            return f"tcp://{host}:{self.port}"
        return f"{self.scheme}://{self.path or self.host}"


def _split_host_port(text: str, rest: str) -> tuple[str, int]:
    bracketed = _BRACKETED.fullmatch(rest)
    if not bracketed and rest.count(":") > 1:
        raise AddressError(text, "has an IPv6 host without brackets", "write tcp://[::1]:5555")
    host, _, port = bracketed.expand(r"\1:\2").rpartition(":") if bracketed else rest.partition(":")
    if not _PORT.fullmatch(port):
        raise AddressError(text, "has no port number", "write tcp://host:5555; port 0 is any free one")
    if bracketed and ":" not in host:
        raise AddressError(text, "has brackets around what is no IPv6 address")
    return host, int(port)


def _is_text(path: str) -> bool:
    return "\0" not in path and not any("\ud800" <= character <= "\udfff" for character in path)


def _is_ip(host: str) -> bool:
    _, has_zone, zone = host.partition("%")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not has_zone or _NAME.fullmatch(zone) is not None


def _looks_like_ipv4(host: str) -> bool:
    """Tell `1.2.3` and `300.1.1.1` from names: a name's last label is not a number (RFC 3696)."""
    return host.rpartition(".")[2].isdigit()
