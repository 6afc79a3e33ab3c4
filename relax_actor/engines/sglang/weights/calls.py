"""The calls of one update: whatever goes wrong in one is an `SglangUpdateError` that names the step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from relax_actor.engines.sglang.weights.errors import DigestError, RouteClosedError, SglangUpdateError
from relax_actor.engines.sglang.weights.payload import Bucket
from relax_actor.engines.sglang.weights.plan import SAYS_SUCCESS, Step
from relax_actor.engines.sglang.weights.records import Client, Loaded
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion

SLACK_S = 5.0
"""How much later than its own deadline the end of a call is noticed at the latest."""


class Calls:
    """One update's way to the server.

    Args:
        client: of the server.
        version: the policy version that is being installed; None for memory.
    """

    def __init__(self, client: Client, version: PolicyVersion | None) -> None:
        self.client, self.version = client, version

    def post(self, step: str, path: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        """Call and wait; the answer says success where it has to."""
        with self.explained(step):
            return self._checked(step, self.client.post(path, body, deadline_s=deadline_s))

    def start(self, path: str, body: Mapping[str, Any], deadline_s: float) -> "Call":
        """Begin a call that loads weights."""
        with self.explained(Step.LOAD):
            return Call(self, self.client.start(path, body, deadline_s=deadline_s), deadline_s)

    def settle(self, step: str, future: Future[Any], deadline_s: float) -> Any:
        """Wait for a call that was begun."""
        with self.explained(step):
            return self._checked(step, future.result(deadline_s + SLACK_S))

    @contextlib.contextmanager
    def explained(self, step: str) -> Iterator[None]:
        """Raise whatever is raised as what it means for the weights."""
        try:
            yield
        except (SglangUpdateError, RouteClosedError, DigestError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise SglangUpdateError(step, self.version, reason) from error

    def _checked(self, step: str, answer: Any) -> Any:
        says = answer.get("success") if isinstance(answer, Mapping) else None
        if says is False or (says is not True and step in SAYS_SUCCESS):
            raise SglangUpdateError(step, self.version, f"the server says {str(answer)[:500]}")
        return answer


class Call:
    """A bucket on its way into the server.

    Args:
        calls: of the update.
        future: of the answer.
        deadline_s: that it has.
    """

    def __init__(self, calls: Calls, future: Future[Any], deadline_s: float) -> None:
        self._calls, self._future, self._deadline_s = calls, future, deadline_s

    def settle(self) -> None:
        """Wait until the bucket is loaded."""
        self._calls.settle(Step.LOAD, self._future, self._deadline_s)


def load_all(
    calls: Calls, stream: Iterator[Bucket], send: Callable[[Bucket], Call], done: Callable[[], None]
) -> Loaded:
    """Send bucket after bucket; the next one is filled while the server loads this one.

    Args:
        calls: of the update.
        stream: what is sent.
        send: begins to.
        done: called whenever a bucket is loaded.
    """
    under_way: Call | None = None
    nbytes = count = 0
    with calls.explained(Step.LOAD):  # a source may fail, too
        for bucket in stream:
            if under_way is not None:
                _settle(under_way, done)
            under_way = send(bucket)
            nbytes, count = nbytes + bucket.nbytes, count + 1
            point("sglang_bucket")
        if under_way is not None:
            _settle(under_way, done)
    return Loaded(nbytes=nbytes, buckets=count)


def _settle(call: Call, done: Callable[[], None]) -> None:
    call.settle()
    done()
