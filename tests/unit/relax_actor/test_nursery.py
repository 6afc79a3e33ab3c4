"""Births whose zygote stands still, and deaths that are felt late; both without processes."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from relax_actor.actor.wire import Spawn
from relax_actor.node import children, nursery
from relax_actor.node.children import ENDING, Children
from relax_actor.node.nursery import Nursery


class StillZygote:
    """Takes orders and answers none."""

    pid = 4711

    def __init__(self):
        self.is_closed, self.waited_s = False, []
        self._ends = os.pipe()

    def fileno(self):
        return self._ends[0]

    def ask(self, spawn, arguments):
        pass

    def answers_within(self, timeout_s):
        self.waited_s.append(timeout_s)
        return False

    def close(self):
        self.is_closed = True
        for end in self._ends:
            os.close(end)
        return "exit code -9"


class Refusals:
    """What of `Children` a birth that fails needs."""

    def __init__(self):
        self.refused = []

    def prepare(self, spawn):
        return spawn, "segment", ""

    def refuse(self, spawn, error):
        self.refused.append((spawn.name, error))


def spawn(name):
    where = {"address": "ipc://a", "log": "l", "crash": "c"}
    return Spawn(name=name, incarnation=1, target="m:C", zygote="default", **where)


def test_an_agent_that_ends_waits_a_moment_for_each_birth_and_no_longer():
    async def play():
        zygote, refusals = StillZygote(), Refusals()
        made = Nursery(None, {"default": zygote}, -1, refusals, say=None, warn=None)
        made.order(spawn("a"), [])
        made.order(spawn("b"), [])
        made.close()
        return zygote, refusals

    zygote, refusals = asyncio.run(play())
    assert zygote.is_closed
    assert zygote.waited_s == [nursery.CLOSE_S]
    reason = "the zygote ended (exit code -9): it stood still"
    assert refusals.refused == [("a", reason), ("b", reason)]


@pytest.mark.parametrize(
    ("reason", "is_dying", "is_said"),
    [("SIGKILL", False, True), ("SIGKILL", True, True), (ENDING, False, True), (ENDING, True, False)],
)
def test_a_death_that_is_felt_after_it_was_told_is_not_told_without_its_cause(
    monkeypatch, reason, is_dying, is_said
):
    """Where the actor has been reaped before the thread looked, nothing says any more why it died."""
    said = []
    made = Children.__new__(Children)
    made._early = SimpleNamespace(say=said.append)
    made._loop = SimpleNamespace(call_soon_threadsafe=lambda *_: None)
    notice = SimpleNamespace(reason=reason)
    monkeypatch.setattr(children, "_notice", lambda _: notice)
    made._felt(SimpleNamespace(is_dying=is_dying))
    assert said == ([notice] if is_said else [])
