"""Why a host cannot be reached or used through ssh, told from what was said on the way. Pure.

ssh exits with 255 for a name that is not known, a refused connection, a host key that has changed, a remote
program that was killed, and a remote program that exited with 255. So its exit code alone is not believed:
what counts is what relax-actor said of itself there, and then the words of ssh and of the remote shell.
"""

import re
from enum import StrEnum

import msgspec

from relax_actor.errors import RelaxError


class SshCause(StrEnum):
    """What stands in the way."""

    NAME = "name"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    ROUTE = "route"
    KEY = "key"
    IDENTITY = "identity"
    HOST_KEY_UNKNOWN = "host_key_unknown"
    HOST_KEY_CHANGED = "host_key_changed"
    RESET = "reset"
    LOST = "lost"
    OPTION = "option"
    SHELL_NOISE = "shell_noise"
    NO_PYTHON = "no_python"
    NO_PACKAGE = "no_package"
    VERSION = "version"
    WORKDIR = "workdir"
    FOLDER = "folder"
    SETUP = "setup"
    UNKNOWN = "unknown"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one try to start a node agent on a host."""

    host: str  # as the user named it
    code: int | None = None  # of the ssh here; a signal's is negative; None while it runs
    output: str = ""  # what ssh and the remote shell have written
    answered: bool = False  # whether relax-actor spoke there
    refusal: str = ""  # the kind, where it spoke and would not start
    fact: str = ""  # its words for that


class SshError(RelaxError):
    """A host cannot be reached, or cannot be used as it is.

    Args:
        host: as the user named it.
        cause: what stands in the way.
        evidence: the words that say so.
    """

    def __init__(self, host: str, cause: SshCause, evidence: str) -> None:
        self.host, self.cause, self.evidence = host, cause, evidence
        self.fact, self.hint = _FACTS[cause], _HINTS[cause].replace("HOST", host)
        said = f"\n  {evidence}" if evidence else ""
        super().__init__(f"{host}: {self.fact}{said}\n\nhint: {self.hint}")


RETRY_ON = (
    r"kex_exchange_identification|Connection (reset|closed) by|ssh_exchange_identification"
    r"|Broken pipe|Connection timed out during banner exchange"
)
"""What ssh says where too many sessions begin at one sshd (MaxStartups), or where it was restarted."""

_PATTERNS = (
    (SshCause.NAME, r"Could not resolve hostname|Name or service not known|nodename nor servname"),
    (SshCause.HOST_KEY_CHANGED, r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed"),
    (SshCause.HOST_KEY_UNKNOWN, r"Host key verification failed|No .* host key is known for"),
    (
        SshCause.IDENTITY,
        r"UNPROTECTED PRIVATE KEY FILE|bad permissions|Load key .*:|Identity file .* not acc",
    ),
    (SshCause.KEY, r"Permission denied|Too many authentication failures|No more authentication methods"),
    (SshCause.OPTION, r"Bad configuration option|command-line line 0:|keyword .* extra arguments|Bad port"),
    (SshCause.REFUSED, r"Connection refused"),
    (SshCause.ROUTE, r"No route to host|Network is unreachable"),
    (SshCause.LOST, r"Timeout, server .* not responding|client_loop: send disconnect"),
    (SshCause.RESET, RETRY_ON),
    (SshCause.TIMEOUT, r"timed out"),
    (SshCause.NO_PACKAGE, r"No module named '?(relax_actor|msgspec|zmq|numpy)"),
    (
        SshCause.NO_PYTHON,
        r"not found|No such file or directory|Permission denied|cannot execute|Unknown command",
    ),
)
_NO_PYTHON_CODES = frozenset({126, 127})

_FACTS = {
    SshCause.NAME: "its name is not known here",
    SshCause.REFUSED: "nobody listens at its ssh port",
    SshCause.TIMEOUT: "it does not answer",
    SshCause.ROUTE: "no route leads there",
    SshCause.KEY: "it accepts none of your keys",
    SshCause.IDENTITY: "the private key cannot be used",
    SshCause.HOST_KEY_UNKNOWN: "its host key is not known here",
    SshCause.HOST_KEY_CHANGED: "its host key is another one than before",
    SshCause.RESET: "its sshd closes new connections",
    SshCause.LOST: "the ssh session broke off",
    SshCause.OPTION: "ssh does not know one of its options",
    SshCause.SHELL_NOISE: "the login shell there ended before relax-actor was started",
    SshCause.NO_PYTHON: "the Python interpreter is not there",
    SshCause.NO_PACKAGE: "relax-actor is not installed for that interpreter",
    SshCause.VERSION: "it has another version of relax-actor",
    SshCause.WORKDIR: "the working directory is not there",
    SshCause.FOLDER: "the run folder cannot be made there",
    SshCause.SETUP: "the setup script failed",
    SshCause.UNKNOWN: "no node agent could be started there",
}

_HINTS = {
    SshCause.NAME: "use its IP address, or add it to ~/.ssh/config or to DNS: getent hosts HOST",
    SshCause.REFUSED: "start sshd there, or give its port: --ssh-port, or port= in the hostfile",
    SshCause.TIMEOUT: "is it up, and does a firewall drop ssh? --connect-timeout gives it more time",
    SshCause.ROUTE: "check the network of this machine: ip route get HOST",
    SshCause.KEY: "nobody is asked for a password: ssh-copy-id HOST, or give --user and --identity",
    SshCause.IDENTITY: "it must be a private key that only you may read: chmod 600 KEY",
    SshCause.HOST_KEY_UNKNOWN: "log in once by hand and accept it: ssh HOST true; or ssh-keyscan HOST >> "
    "~/.ssh/known_hosts, if you trust the network",
    SshCause.HOST_KEY_CHANGED: "if it was installed anew: ssh-keygen -R HOST, then log in once by hand; if "
    "not, somebody may be in between",
    SshCause.RESET: "it takes few sessions at once: lower --fanout, or raise MaxStartups in its sshd_config",
    SshCause.LOST: "the host or the network between stopped answering; the same command again goes on from "
    "the newest checkpoint",
    SshCause.OPTION: "look at --ssh-opt and ~/.ssh/config: ssh -G HOST",
    SshCause.SHELL_NOISE: "a start-up file such as ~/.bashrc exits or starts another program in sessions "
    "without a terminal: ssh HOST true",
    SshCause.NO_PYTHON: "give the path it has there: --venv DIR or --remote-python PATH; a non-interactive "
    "shell has a PATH of its own",
    SshCause.NO_PACKAGE: "install it in that environment there, or give another: --venv DIR",
    SshCause.VERSION: "install the same version everywhere",
    SshCause.WORKDIR: "make it there, share it, or give one that is there: --workdir DIR",
    SshCause.FOLDER: "give one that can be made on every host: --run-dir DIR",
    SshCause.SETUP: "its own words are in the agent's log; try it by hand: ssh HOST sh -x < FILE",
    SshCause.UNKNOWN: "its own words are in the agent's log; try it by hand: ssh HOST true",
}


def explain(attempt: Attempt) -> SshError:
    """Return why a try failed."""
    cause, evidence = _cause_of(attempt)
    return SshError(attempt.host, cause, evidence)


def _cause_of(attempt: Attempt) -> tuple[SshCause, str]:
    if attempt.refusal:
        known = attempt.refusal in set(SshCause)
        return SshCause(attempt.refusal) if known else SshCause.UNKNOWN, attempt.fact
    lines = [line.strip() for line in attempt.output.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if attempt.answered:
        return SshCause.LOST if attempt.code not in {0, None} else SshCause.UNKNOWN, last
    if attempt.code in _NO_PYTHON_CODES:
        return SshCause.NO_PYTHON, last
    for cause, pattern in _PATTERNS:
        for line in reversed(lines):
            if re.search(pattern, line):
                return cause, line
    if attempt.code is None:
        return SshCause.TIMEOUT, last
    return (
        SshCause.SHELL_NOISE if attempt.code == 0 else SshCause.UNKNOWN,
        last or f"exit code {attempt.code}",
    )
