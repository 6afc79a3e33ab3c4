"""What can go wrong between a rollout and its SGLang server."""

from relax_actor.engines.errors import EngineNotReadyError
from relax_actor.errors import RelaxError


class ServerError(RelaxError):
    """The server answered a call with an error.

    Args:
        path: of the call.
        status: of HTTP.
        text: what it said.
    """

    def __init__(self, path: str, status: int, text: str) -> None:
        self.path, self.status, self.text = path, status, text
        super().__init__(f"SGLang answered {path} with {status}: {text[:500]}")


class ServerGoneError(RelaxError):
    """The server's process is gone, or its connection was closed before it answered.

    Args:
        fact: what was seen.
    """

    def __init__(self, fact: str) -> None:
        self.fact = fact
        super().__init__(fact)


class DeadlineError(RelaxError):
    """The server did not answer in time.

    Args:
        path: of the call.
        deadline_s: how long it had.
    """

    def __init__(self, path: str, deadline_s: float) -> None:
        self.path, self.deadline_s = path, deadline_s
        super().__init__(f"SGLang did not answer {path} within {deadline_s:g} s")


class ServerHungError(RelaxError):
    """The server answers, but generates nothing.

    Args:
        waited_s: how long one token was waited for.
    """

    def __init__(self, waited_s: float) -> None:
        self.waited_s = waited_s
        super().__init__(
            f"SGLang generated nothing for {waited_s:.0f} s, not even one token that was asked for"
        )


class StartError(RelaxError):
    """The server did not come up.

    Args:
        fact: how it failed.
        last_line: of its log.
        log: where that is.
    """

    def __init__(self, fact: str, last_line: str, log: str) -> None:
        self.fact, self.last_line, self.log = fact, last_line, log
        super().__init__(f"the SGLang server {fact}; its last word: {last_line or 'none'}\n\nhint: see {log}")


class EngineDownError(EngineNotReadyError):
    """This engine was given up: its server is killed, and only a new one may go on.

    Args:
        reason: why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        Exception.__init__(self, f"the SGLang engine is down: {reason}")
