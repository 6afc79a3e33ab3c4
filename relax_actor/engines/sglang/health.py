"""Whether the server still generates, which its own health page does not say: it is asked for a token.

While tokens come nobody asks. An answer that takes too long may mean that the server has much to do; it is
taken for hung only if what it says of its load has not changed either.
"""

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from relax_actor.engines.sglang.errors import DeadlineError, ServerError, ServerGoneError, ServerHungError
from transport.clock import Clock, SystemClock


class Calls(Protocol):
    """What of a client is needed."""

    def get(self, path: str, *, deadline_s: float) -> Any:
        """Get and wait."""
        ...

    def start(self, path: str, body: Any = None, *, deadline_s: float) -> "Future[Any]":
        """Post."""
        ...


class Health:
    """Looks after one server.

    Args:
        client: of the server.
        every_s: how long nothing may come before a token is asked for; and how long that may take.
        on_ready: called in another thread when there is an answer.
        clock: what time is measured on.
    """

    def __init__(
        self, client: Calls, *, every_s: float, on_ready: Callable[[], None], clock: Clock | None = None
    ) -> None:
        self._client, self._every_s, self._on_ready = client, every_s, on_ready
        self._clock = clock or SystemClock()
        self._alive_at = self._clock.monotonic()
        self._progress = 0
        self._asked: Future[Any] | None = None
        self._load: Any = None

    @property
    def next_s(self) -> float:
        """How long until `look` has something to do, unless there is an answer before."""
        if self._asked is not None:
            return self._every_s
        return max(0.0, self._alive_at + self._every_s - self._clock.monotonic())

    def ask_now(self) -> None:
        """Have the next `look` ask for a token, as after an update."""
        self._alive_at = -self._every_s

    def settle(self) -> None:
        """Wait for the token that was asked for: a server that is asked for memory must be idle.

        Raises:
            ServerHungError, ServerGoneError, ServerError: as `look`.
        """
        if self._asked is not None:
            self._judge(self._asked)

    def look(self, progress: int) -> bool:
        """Ask, or judge the answer; return whether there was a sign of life since the last look.

        Args:
            progress: a number that grows when tokens come.

        Raises:
            ServerHungError: nothing is generated.
            ServerGoneError, ServerError: the server is gone, or broken.
        """
        if progress != self._progress:
            self._progress = progress
            self._live()
            return True
        if self._asked is not None:
            return self._asked.done() and self._judge(self._asked)
        if self.next_s <= 0:
            self._ask()
        return False

    def _ask(self) -> None:
        self._load = self._loads()
        self._asked = ask_for_a_token(self._client, deadline_s=self._every_s)
        self._asked.add_done_callback(lambda _: self._on_ready())

    def _judge(self, asked: "Future[Any]") -> bool:
        self._asked = None
        try:
            asked.result()
        except DeadlineError as error:
            load = self._loads()
            if load is None or load == self._load:
                raise ServerHungError(error.deadline_s) from error
        self._live()
        return True

    def _live(self) -> None:
        self._alive_at = self._clock.monotonic()

    def _loads(self) -> Any:
        """Return what the server says of its load, but for the time; None where it is silent."""
        try:
            answer = self._client.get("/v1/loads", deadline_s=min(self._every_s, 5.0))
        except (DeadlineError, ServerError, ServerGoneError):
            return None
        loads = answer.get("loads", []) if isinstance(answer, dict) else []
        return [{name: value for name, value in load.items() if name != "timestamp"} for load in loads]


def ask_for_a_token(client: Calls, *, deadline_s: float) -> "Future[Any]":
    """Ask the server for one token of nothing."""
    rid = uuid.uuid4().hex
    body = {
        "input_ids": [0],
        "rid": rid,
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True},
        "extra_key": rid,
    }
    return client.start("/generate", body, deadline_s=deadline_s)
