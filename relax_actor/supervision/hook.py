"""The `on_failure` hook: the embedding program's word on what follows from an actor's failure.

It runs on a thread of its own, one failure at a time, and is called exactly once for each incarnation
that failed. What it raises is its answer, too: the supervisor then fails upward and names it.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_actor.actor.ref import Ref
from relax_actor.supervision.commands import Consult
from relax_actor.supervision.events import Decided, Decision, Exit


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One incarnation that failed."""

    child: str
    incarnation: int
    exit: Exit
    restarts: int
    """How often the child had been started again before."""
    supervisor: str
    ref: Ref[Any]
    """The child: calls wait for its next incarnation."""


Hook: TypeAlias = Callable[[Failure], Decision | None]


class HookRunner:
    """Asks the hook.

    Args:
        hook: what the user gave.
        ref: makes a ref to a name.
        answer: takes the answer; called in the hook's thread.
    """

    def __init__(self, hook: Hook, ref: Callable[[str], Ref[Any]], answer: Callable[[Decided], None]) -> None:
        self._hook, self._ref, self._answer = hook, ref, answer
        self._questions: queue.SimpleQueue[Consult | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="on_failure", daemon=True)

    def ask(self, consult: Consult) -> None:
        """Put a question; returns at once."""
        if self._thread.ident is None:
            self._thread.start()
        self._questions.put(consult)

    def close(self) -> None:
        """Ask nothing more; a hook that is still thinking is left to itself."""
        self._questions.put(None)

    def _run(self) -> None:
        while (consult := self._questions.get()) is not None:
            self._answer(self._decide(consult))

    def _decide(self, consult: Consult) -> Decided:
        failure = Failure(
            child=consult.name,
            incarnation=consult.incarnation,
            exit=consult.exit,
            restarts=consult.restarts,
            supervisor=consult.supervisor,
            ref=self._ref(consult.name),
        )
        try:
            answer = self._hook(failure)
            decision, detail = (None, "") if answer is None else (Decision(answer), "")
        except Exception as error:  # noqa: BLE001 - whatever the user's hook raises is its answer
            decision, detail = Decision.ESCALATE, f"it raised {_chain(error)}"
        return Decided(name=consult.name, incarnation=consult.incarnation, decision=decision, detail=detail)


def _chain(error: BaseException) -> str:
    """Return the error and what it came from, the last first."""
    texts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return ", from ".join(texts)
