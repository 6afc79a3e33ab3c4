"""A reply is a future like any other, whoever looks at it and whenever."""

import threading
from concurrent import futures

import pytest

from relax_actor.actor.ref import Reply


def test_one_that_nobody_looked_at_has_its_value_or_error() -> None:
    good, bad = Reply[int](), Reply[int]()
    good.end(7, None)
    bad.end(None, ValueError("no"))

    assert (good.done(), good.result(), good.exception()) == (True, 7, None)
    assert isinstance(bad.exception(), ValueError)
    with pytest.raises(ValueError, match="no"):
        bad.result()


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_who_waits_for_it_is_woken(error: Exception | None) -> None:
    reply = Reply[int]()
    seen: list[object] = []
    waiting = threading.Thread(target=lambda: seen.append(futures.wait((reply,), 30.0).done))
    waiting.start()
    while "_condition" not in vars(reply):
        pass
    reply.end(7, error)
    waiting.join()

    assert seen == [{reply}]
    assert reply.exception() is error


def test_no_wake_up_is_lost_between_its_end_and_who_begins_to_wait() -> None:
    for value in range(300):
        reply = Reply[int]()
        ending = threading.Thread(target=reply.end, args=(value, None))
        ending.start()
        assert reply.result(30.0) == value
        ending.join()


def test_callbacks_are_called_before_and_after_its_end() -> None:
    reply, called = Reply[int](), []
    reply.add_done_callback(lambda ended: called.append(("before", ended.result())))
    reply.end(7, None)
    reply.add_done_callback(lambda ended: called.append(("after", ended.result())))

    assert called == [("before", 7), ("after", 7)]


def test_one_that_was_cancelled_stays_so() -> None:
    reply = Reply[int]()
    assert reply.cancel()
    reply.end(7, None)

    assert reply.cancelled()
    with pytest.raises(futures.CancelledError):
        reply.result()


def test_the_time_to_wait_for_it_is_bounded() -> None:
    with pytest.raises(TimeoutError):
        Reply[int]().result(0.0)


def test_it_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        Reply[int]().nothing  # noqa: B018 - reading it is the test
