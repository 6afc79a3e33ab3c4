"""What a remote host says to its head over the session that started it: records and framing. No I/O.

A command that leads to another host, such as ssh, says little: its exit code may be its own or the other
side's, and a login shell writes to standard output whatever it likes. So the head sends `Boot` first, which
bears a word that nobody else knows. The other side says that word before anything of its own; what comes
before is noise. After it come records, each with its length before it.
"""

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from transport.errors import CodecError

MAX_NOISE_BYTES = 256 * 1024
"""How much noise is kept, and searched, while the word is waited for."""

_MARK = b"\n\x00relax-actor\x00"
_LENGTH_BYTES = 4
_MAX_RECORD_BYTES = 64 * 1024 * 1024


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Head to remote host, the first thing on standard input: what the node agent is to start in."""

    version: str = ""  # of relax-actor
    word: str = ""  # of this start; nobody else knows it
    workdir: str = ""  # absolute; empty: where the session starts
    env: tuple[tuple[bytes, bytes], ...] = ()
    setup: str = ""  # a shell script that is sourced last, in `workdir` and with `env`
    head: str = ""  # the head's IP address or name, by which the network interface is found
    interface: str = ""  # the network interface, where it is known
    no_proxy: tuple[str, ...] = ()  # hosts that are spoken to without a proxy
    run_id: str = ""
    shm_root: str = ""  # where segments of the run are
    run_dir: str = ""  # whose events, logs and crash reports are handed over
    offsets: dict[str, int] | None = None  # how far each file has been handed over; None: begin at their ends
    is_survey: bool = False  # start no node agent: answer what follows, see `survey.probe`

    def __repr__(self) -> str:
        return f"Boot(workdir={self.workdir!r}, {len(self.env)} variables)"  # their values are secrets


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """The session has led to relax-actor: the host is reached."""

    version: str
    python: str  # 3.11.2
    node: str  # what the host calls itself
    pid: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The host is reached, and no node agent can be started there."""

    kind: str  # of `SshCause` of the launcher: version, workdir, setup, folder
    fact: str


class Grown(msgspec.Struct, frozen=True, kw_only=True, tag="grown"):
    """A file of the run folder has grown by these bytes."""

    path: str  # below the run folder
    data: bytes
    offset: int  # in the remote file, after these bytes


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The keeper has ended, so nothing of the run is left there, and every file was handed over."""

    code: int


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered"):
    """The answer to a question of a survey."""

    body: bytes  # msgpack; a record of `survey.records`


Said: TypeAlias = Began | Refused | Grown | Ended | Answered

_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def greeting(word: str) -> bytes:
    """Return what comes before the first record."""
    return _MARK + word.encode() + b"\x00"


def framed(record: msgspec.Struct) -> bytes:
    """Return a record with its length before it."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Unframer:
    """Bytes in, records out.

    Args:
        word: after which records come.

    Attributes:
        noise: what came before the word, or the end of it.
    """

    def __init__(self, word: str) -> None:
        self._greeting = greeting(word)
        self._data = bytearray()
        self._is_greeted = False
        self.noise = b""

    def feed(self, data: bytes) -> Iterator[Said]:
        """Take in bytes and yield the records that are whole now.

        Raises:
            CodecError: what follows the word is no record.
        """
        self._data += data
        if self._is_greeted or self._greet():
            yield from self._records()

    def _greet(self) -> bool:
        at = self._data.find(self._greeting)
        noise = bytes(self._data[: at if at >= 0 else None])
        self.noise = noise[-MAX_NOISE_BYTES:]
        if at < 0:
            del self._data[:-MAX_NOISE_BYTES]
            return False
        del self._data[: at + len(self._greeting)]
        self._is_greeted = True
        return True

    def _records(self) -> Iterator[Said]:
        while len(self._data) >= _LENGTH_BYTES:
            length = int.from_bytes(self._data[:_LENGTH_BYTES], "little")
            if length > _MAX_RECORD_BYTES:
                raise CodecError("a record of another host", f"it claims {length} bytes")
            end = _LENGTH_BYTES + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH_BYTES:end])
            del self._data[:end]
            yield _decode(body)


def read_boot(body: bytes) -> Boot:
    """Return what a head sent first.

    Raises:
        CodecError: it is nothing that this version knows.
    """
    try:
        return msgspec.msgpack.decode(body, type=Boot)
    except msgspec.DecodeError as error:
        raise CodecError("what the head sent first", str(error)) from error


def _decode(body: bytes) -> Said:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise CodecError("a record of another host", str(error)) from error
