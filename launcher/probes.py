"""One host that is asked what it is and has, through the session that would start its agent.

The session is opened, asked, and closed again; nothing stays on the host.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from launcher.ssh_causes import Attempt
from relax_actor import __version__
from relax_actor.node.inband import Answered, Began, Boot, Refused, Unframer, framed
from relax_actor.supervision.hosts import Host, Session
from relax_actor.survey.records import Facts, Reached
from transport.errors import CodecError

T = TypeVar("T", Facts, Reached)

OPEN_S = 30.0
"""How long a session may take until relax-actor speaks in it, beside what connecting may take."""

END_S = 5.0
_NOISE_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How hosts are asked."""

    fanout: int = 32
    open_s: float = OPEN_S
    answer_s: float = 120.0
    head: str = ""  # where they reach this program


class NoAnswerError(Exception):
    """A host did not answer."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        super().__init__(attempt.host)


class Probe:
    """A probe on one host, and the way to it."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process, word: str) -> None:
        self._host, self._process = host, process
        self._unframer = Unframer(word)
        self._answers: list[bytes] = []
        self._refused: Refused | None = None
        self._began = False
        self._errors = b""
        self._listening = asyncio.ensure_future(self._keep_errors())

    @classmethod
    async def open(cls, host: Host, terms: Terms) -> "Probe":
        """Start a probe and wait until it speaks.

        Raises:
            NoAnswerError: it does not.
        """
        session = host.session or Session()
        word = secrets.token_hex(16)
        process = await asyncio.create_subprocess_exec(
            *(*host.prefix, host.interpreter, "-P", "-m", "relax_actor.node", "--stdin-frame"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self = cls(host, process, word)
        self.say(
            Boot(
                version=__version__,
                word=word,
                workdir=session.workdir,
                env=session.env,
                setup=session.setup,
                head=terms.head if host.prefix else "",
                interface=session.interface,
                no_proxy=session.no_proxy,
                is_survey=True,
            )
        )
        await self._until(lambda: self._began, terms.open_s)
        return self

    def say(self, record: msgspec.Struct) -> None:
        """Send a record; what cannot be sent shows in that nothing is answered."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        with suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(framed(record))

    async def answer(self, kind: type[T], within_s: float) -> T:
        """Return the next answer.

        Raises:
            NoAnswerError: there is none.
        """
        await self._until(lambda: bool(self._answers), within_s)
        try:
            return msgspec.msgpack.decode(self._answers.pop(0), type=kind)
        except msgspec.MsgspecError as error:
            raise NoAnswerError(self._attempt(None, str(error))) from error

    async def close(self) -> None:
        """Let the probe end, and the way to it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        with suppress(TimeoutError):  # somebody else may have its standard error, and keep it
            await asyncio.wait_for(self._listening, END_S)

    def _kill(self) -> None:
        """Kill the way to the probe, with what it has started here."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _until(self, is_there: Callable[[], bool], within_s: float) -> None:
        """Read until something is there.

        Raises:
            NoAnswerError: the session has ended, or took too long.
        """
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        fact = ""
        try:
            async with asyncio.timeout(within_s):
                while not is_there():
                    data = await self._process.stdout.read(_READ_BYTES)
                    if not data or self._refused is not None:
                        break
                    self._take(data)
        except TimeoutError:
            fact = f"it did not answer within {within_s:g} s"
            self._kill()
        except CodecError as error:
            fact = str(error)
        if is_there() and not fact:
            return
        is_over = not fact
        await self.close()
        raise NoAnswerError(self._attempt(self._process.returncode if is_over else None, fact))

    def _take(self, data: bytes) -> None:
        for record in self._unframer.feed(data):
            match record:
                case Began():
                    self._began = True
                case Refused():
                    self._refused = record
                case Answered():
                    self._answers.append(record.body)

    def _attempt(self, code: int | None, fact: str) -> Attempt:
        output = (self._unframer.noise + b"\n" + self._errors).decode(errors="replace")
        refused = self._refused
        return Attempt(
            host=self._host.name,
            code=code,
            output=output,
            answered=self._began,
            refusal=refused.kind if refused is not None else "",
            fact=refused.fact if refused is not None else fact,
        )

    async def _keep_errors(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - a pipe
        while data := await self._process.stderr.read(_READ_BYTES):
            self._errors = (self._errors + data)[-_NOISE_BYTES:]
