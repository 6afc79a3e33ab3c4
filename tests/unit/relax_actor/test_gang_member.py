"""A rank's own view of its gang, without processes."""

import sys
import threading
import types

import pytest

from relax_actor.actor.gang import Gang, abort_collectives
from relax_actor.actor.wire import Regroup
from relax_actor.errors import GangAborted


def group(epoch: int = 1) -> Regroup:
    return Regroup(epoch=epoch, rank=1, size=2, rendezvous=f"file:///x-{epoch}")


def test_before_the_first_group_there_is_nothing_to_use() -> None:
    gang = Gang()
    assert (gang.epoch, gang.rank, gang.size, gang.rendezvous) == (0, 0, 0, "")
    with pytest.raises(GangAborted, match="is not formed yet"):
        gang.check()


def test_a_group_is_good_until_it_is_aborted_and_the_next_one_is_good_again() -> None:
    gang = Gang()
    gang.join(group())
    gang.check()
    gang.abort(1, "`a/0` SIGKILL")
    with pytest.raises(GangAborted, match="group 1 is broken: `a/0` SIGKILL") as caught:
        gang.check()
    assert (caught.value.epoch, caught.value.reason) == (1, "`a/0` SIGKILL")
    gang.join(group(2))
    gang.check()
    assert (gang.rank, gang.size, gang.rendezvous) == (1, 2, "file:///x-2")


def test_a_group_aborted_before_it_was_joined_is_broken() -> None:
    gang = Gang()
    gang.abort(1, "x")
    gang.join(group(1))
    assert not gang.is_whole


def test_a_collectives_error_waits_for_the_news_of_the_death_behind_it(monkeypatch) -> None:
    monkeypatch.setattr("relax_actor.actor.gang.NEWS_S", 60.0)
    gang = Gang()
    gang.join(group())
    timer = threading.Timer(0.05, gang.abort, (1, "late news"))
    timer.start()
    assert gang.broke_since(0, RuntimeError("connection closed by peer"))
    timer.join()


def test_other_errors_do_not_wait() -> None:
    gang = Gang()
    gang.join(group())
    assert not gang.broke_since(0, ValueError("x"))
    assert not gang.broke_since(0)


class _Fake(types.ModuleType):
    def __init__(self, *, is_there: bool) -> None:
        super().__init__("torch.distributed")
        self.aborted = 0
        self.is_available = lambda: True
        self.is_initialized = lambda: is_there
        self.distributed_c10d = types.SimpleNamespace(_abort_process_group=self._abort)

    def _abort(self) -> None:
        self.aborted += 1


@pytest.mark.parametrize("is_there", [False, True])
def test_groups_are_aborted_only_where_there_are_any(monkeypatch, is_there: bool) -> None:
    fake = _Fake(is_there=is_there)
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    abort_collectives()
    assert fake.aborted == is_there


def test_without_torch_there_is_nothing_to_abort(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    abort_collectives()
