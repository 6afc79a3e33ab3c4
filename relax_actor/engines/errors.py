"""What an engine refuses, and why."""

from relax_actor.errors import RelaxError
from relax_actor.ids import GroupId, SampleIndex


class EngineNotReadyError(RelaxError, RuntimeError):
    """No whole policy version is installed, so nothing may be sampled."""

    def __init__(self) -> None:
        super().__init__(
            "no policy version is installed\n\nhint: an engine starts with random weights, and a failed "
            "install leaves mixed ones; call `install` first",
        )


class RequestError(RelaxError, ValueError):
    """A request can never be sampled as it is; trying again does not help.

    Args:
        key: group and sample of the request.
        fact: what is wrong with it.
    """

    def __init__(self, key: tuple[GroupId, SampleIndex], fact: str) -> None:
        self.key, self.fact = key, fact
        super().__init__(f"sample {key[1]} of group {key[0]}: {fact}")


class LogitsError(RelaxError, ArithmeticError):
    """The model's output is not a distribution: NaN, or no token is possible.

    Args:
        rows: which rows of the batch.
    """

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        super().__init__(
            f"logits of rows {rows} are no distribution: NaN, or every token is -inf or forbidden"
            "\n\nhint: most often the installed weights hold NaN",
        )


def require_idle(in_flight: int) -> None:
    """Refuse to have an engine sleep that works.

    Raises:
        ValueError: requests are in flight.
    """
    if in_flight:
        raise ValueError(f"an engine with {in_flight} requests in flight cannot sleep")
