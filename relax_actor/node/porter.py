"""The first process of a session on a remote host: makes the keeper's surroundings, then reports.

`exec PYTHON -P -m relax_actor.node --stdin-frame` is all that a command line ever says. This process reads
`Boot` from standard input, says its word, applies working directory, environment and setup script, and starts
the keeper, which reads on from the same standard input. Then it hands the host's events, logs and crash
reports over (`handover`), and at last says how the keeper ended: an exit code that passes through ssh may
be anybody's, and is not believed.

It is the keeper's subreaper: whatever a killed keeper leaves is ended here. When it is itself killed, the
keeper is told to end. When its head lets go while the keeper is still busy importing, it has it ended.
"""

import fcntl
import os
import platform
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import relax_actor
from relax_actor import network
from relax_actor.node import process
from relax_actor.node.handover import Handover
from relax_actor.node.inband import Began, Boot, Ended, Refused, Said, framed, greeting, read_boot
from relax_actor.node.names import END_NOW
from transport.errors import CodecError
from transport.shm import ShmSpace

EXIT_REFUSED = 78
EXIT_KEEPER_KILLED = 70

LET_GO_S = 5.0
"""How long a keeper may take to end by itself once its head has let go."""

LAST_WORDS_S = 5.0
"""How long the last round of the handover may take; a session that hangs takes for ever."""

SWEEP_S = 30.0
ROUND_S = 0.1
_SCRIPT_FD, _PASSED_FD = 8, 9
_SETUP = (
    f". /proc/self/fd/{_SCRIPT_FD} </dev/null || exit; echo >&{_PASSED_FD}; "
    f'exec {_SCRIPT_FD}<&- {_PASSED_FD}>&- "$@"'
)


class RefusedError(Exception):
    """No keeper can be started here."""

    def __init__(self, kind: str, fact: str) -> None:
        self.record = Refused(kind=kind, fact=fact)
        super().__init__(fact)


def main() -> None:
    """Serve one session; leave with the keeper's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first = _read_frame()
    session = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints, prints into the log
    os._exit(_Porter(session).serve(first))


def _read_frame() -> bytes:
    """Read exactly one frame: what follows it is the keeper's."""
    return _read_exactly(int.from_bytes(_read_exactly(4), "little"))


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := os.read(sys.stdin.fileno(), size - len(data))):
            os._exit(1)  # the head is gone before it has said what it wants
        data += more
    return data


class _Porter:
    """One session.

    Args:
        session: descriptor that leads to the head.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._has_ended = threading.Event()
        self._lock = threading.Lock()

    def serve(self, first: bytes) -> int:
        """Start a keeper as the head wants it and stay until nothing of it is left; return the exit code."""
        try:
            boot = read_boot(first)
        except CodecError as error:  # there is no word to say
            print(f"the head speaks another version: {error}", file=sys.stderr)  # noqa: T201 - the agent's log
            return EXIT_REFUSED
        self._write(greeting(boot.word))
        self._say(_began())
        try:
            _settle(boot)
            return self._survey(boot) if boot.is_survey else self._keep(boot)
        except RefusedError as refusal:
            self._say(refusal.record)
            return EXIT_REFUSED

    def _keep(self, boot: Boot) -> int:
        process.become_subreaper()
        keeper, passed = _start(boot, [sys.executable, "-P", "-m", "relax_actor.node"])
        handover = Handover(Path(boot.run_dir), boot.offsets, self._say)
        thread = threading.Thread(target=self._hand_over, args=(handover,), name="handover", daemon=True)
        thread.start()
        status = os.waitstatus_to_exitcode(_await(keeper))
        process.end_children(SWEEP_S)
        if status < 0:  # a keeper that was killed has swept nothing
            ShmSpace(boot.run_id, boot.shm_root).sweep()
        self._has_ended.set()
        thread.join(LAST_WORDS_S)
        if not os.read(passed, 1):
            raise RefusedError("setup", f"the setup script ended with {_how(status)}")
        code = status if status >= 0 else EXIT_KEEPER_KILLED
        if not thread.is_alive():
            with suppress(OSError):  # the session is over
                self._say(Ended(code=code))
        return code

    def _survey(self, boot: Boot) -> int:
        """Have a probe answer the head by itself, in the surroundings that actors would have."""
        answers = fcntl.fcntl(self._session, fcntl.F_DUPFD, _PASSED_FD + 1)
        probe, passed = _start(boot, [sys.executable, "-P", "-m", "relax_actor.survey.probe", str(answers)])
        status = os.waitstatus_to_exitcode(_await(probe))
        if not os.read(passed, 1):
            raise RefusedError("setup", f"the setup script ended with {_how(status)}")
        return status if status >= 0 else EXIT_KEEPER_KILLED

    def _hand_over(self, handover: Handover) -> None:
        with suppress(OSError):  # the session is over
            while not self._has_ended.wait(ROUND_S):
                while handover.one_round() and not self._has_ended.is_set():
                    pass
            while handover.one_round(is_last=True):
                pass

    def _say(self, record: Said) -> None:
        with self._lock:
            self._write(framed(record))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._session, view) :]


def _began() -> Began:
    return Began(
        version=relax_actor.__version__,
        python=platform.python_version(),
        node=os.uname().nodename,
        pid=os.getpid(),
    )


def _settle(boot: Boot) -> None:
    """Make this process' surroundings those that the keeper is to have.

    Raises:
        RefusedError: they cannot be had.
    """
    if boot.version != relax_actor.__version__:
        ours = relax_actor.__version__
        raise RefusedError("version", f"it has relax-actor {ours}, the head {boot.version}")
    for name, value in boot.env:
        os.environb[name] = value
    network.set_environment(os.environ, peer=boot.head, interface=boot.interface, no_proxy=boot.no_proxy)
    _attempt("workdir", "its working directory", lambda: os.chdir(boot.workdir or "."))
    if not boot.is_survey:
        _attempt("folder", "its run folder", lambda: Path(boot.run_dir).mkdir(parents=True, exist_ok=True))


def _attempt(kind: str, what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        raise RefusedError(kind, f"{what}: {error.strerror}: {error.filename}") from None


def _start(boot: Boot, command: list[str]) -> tuple[int, int]:
    """Start a keeper, or a probe.

    Returns:
        Its pid, and a descriptor to read a byte from once the setup script has passed.
    """
    porter = os.getpid()
    passed, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(command, boot.setup, porter, told)
    if not boot.setup:
        os.write(told, b"\n")
    os.close(told)
    return pid, passed


def _become(command: list[str], setup: str, porter: int, told: int) -> NoReturn:
    try:
        process.die_with_parent(porter, signal.SIGTERM)
        if setup:
            command = _with_setup(command, setup, told)
        os.execv(command[0], command)  # noqa: S606 - a shell is in `command` where one is wanted
    finally:
        os._exit(EXIT_REFUSED)


def _with_setup(command: list[str], setup: str, told: int) -> list[str]:
    """Return the command that runs another one in a shell that has sourced a script; nobody else sees it."""
    script = os.memfd_create("setup")
    os.write(script, setup.encode("utf-8", "surrogateescape"))
    os.lseek(script, 0, os.SEEK_SET)
    beyond = [fcntl.fcntl(fd, fcntl.F_DUPFD, _PASSED_FD + 1) for fd in (script, told)]  # out of the way
    for fd, target in zip(beyond, (_SCRIPT_FD, _PASSED_FD), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    return [shutil.which("bash") or "/bin/sh", "-c", _SETUP, "setup", *command]


def _await(pid: int) -> int:
    """Wait for the keeper; have it ended where its head lets go and it does not end by itself."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLRDHUP)
    timeout_s: float | None = None
    while pidfd not in (found := dict(poll.poll(timeout_s and timeout_s * 1000))):
        if found:  # the head let go
            poll.unregister(sys.stdin.fileno())
            timeout_s = LET_GO_S
        else:
            signal.pidfd_send_signal(pidfd, END_NOW)
            timeout_s = None
    os.close(pidfd)
    return os.waitpid(pid, 0)[1]


def _how(status: int) -> str:
    return f"exit code {status}" if status >= 0 else process.signal_name(-status)
