"""What the `on_failure` hook is asked, and what its answers become."""

import queue

import pytest

from relax_actor.supervision.commands import Consult
from relax_actor.supervision.events import Decided, Decision, Exit, ExitKind
from relax_actor.supervision.hook import Failure, HookRunner

CONSULT = Consult(
    name="a",
    incarnation=2,
    exit=Exit(kind=ExitKind.SIGNAL, signal=9),
    restarts=1,
    supervisor="run",
)


def ask(hook) -> Decided:
    answers: queue.Queue[Decided] = queue.Queue()
    runner = HookRunner(hook, lambda name: f"ref to {name}", answers.put)
    runner.ask(CONSULT)
    try:
        return answers.get(timeout=60)
    finally:
        runner.close()


@pytest.mark.parametrize("decision", [None, *Decision])
def test_what_the_hook_says_is_the_answer(decision) -> None:
    assert ask(lambda _failure: decision) == Decided(name="a", incarnation=2, decision=decision)


def test_the_hook_learns_who_failed_and_how() -> None:
    seen: list[Failure] = []
    ask(seen.append)
    assert seen == [
        Failure(
            child="a",
            incarnation=2,
            exit=CONSULT.exit,
            restarts=1,
            supervisor="run",
            ref="ref to a",
        )
    ]


def _raise_from(_failure: Failure) -> None:
    raise ValueError("cannot say") from KeyError("row")


def _raise_in_a_circle(_failure: Failure) -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize(
    ("hook", "detail"),
    [
        (_raise_from, "it raised ValueError: cannot say, from KeyError: 'row'"),
        (_raise_in_a_circle, "it raised ValueError: one, from ValueError: two"),
        (lambda _failure: "perhaps", "it raised ValueError: 'perhaps' is not a valid Decision"),
    ],
)
def test_what_the_hook_raises_escalates_with_its_chain(hook, detail: str) -> None:
    assert ask(hook) == Decided(name="a", incarnation=2, decision=Decision.ESCALATE, detail=detail)


def test_a_runner_that_was_never_asked_closes_quietly() -> None:
    HookRunner(lambda _failure: None, str, print).close()
