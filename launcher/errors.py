"""What the launcher refuses, and how it says so."""

from collections.abc import Sequence
from enum import IntEnum

from relax_actor.errors import ConfigError, RelaxError


class ExitCode(IntEnum):
    """What the shell learns; a signal's is 128 + its number."""

    DONE = 0
    RUN_FAILED = 1
    CONFIG = 2
    PREFLIGHT = 3
    HOST_LOST = 4


class RefusedError(ConfigError):
    """Nothing was started.

    Args:
        problems: what is wrong, at least one.
        exit_code: CONFIG where the request is wrong, PREFLIGHT where this machine cannot serve it.
    """

    def __init__(self, problems: Sequence[ConfigError], exit_code: ExitCode = ExitCode.CONFIG) -> None:
        self.problems, self.exit_code = tuple(problems), exit_code
        first = self.problems[0]
        super().__init__(first.where, first.fact, first.hint)

    def __str__(self) -> str:
        return "\n\n".join(str(problem) for problem in self.problems)


class RunFolderError(RelaxError):
    """A folder is not a run, or not free to run in."""

    def __init__(self, fact: str, hint: str = "") -> None:
        self.fact, self.hint = fact, hint
        super().__init__(fact + (f"\n\nhint: {hint}" if hint else ""))


class OrderError(RelaxError):
    """A running head does not do what an operator wants."""

    def __init__(self, fact: str, hint: str = "") -> None:
        self.fact, self.hint = fact, hint
        super().__init__(fact + (f"\n\nhint: {hint}" if hint else ""))


def report(error: RelaxError) -> str:
    """Return what the user reads: `error: …`, a blank line, `hint: …`, for every problem."""
    problems = error.problems if isinstance(error, RefusedError) else (error,)
    return "\n\n".join(f"error: {problem}" for problem in problems)
