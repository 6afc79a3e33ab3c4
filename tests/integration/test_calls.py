"""Calls in bounds: credit, cancellation, the control lane, circles, large frames, fan-out, strange errors."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from call_actors import Worker
from watching import eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec, gather, gather_all, stream
from relax_actor.actor.mailbox import CREDIT_MESSAGES
from relax_actor.errors import (
    ActorDied,
    CallRefused,
    CallTimeout,
    DeadlockError,
    Executed,
    MailboxFull,
    MeshError,
    RemoteError,
    SerializationError,
)

MIB = 2**20


@pytest.fixture
def tree(tmp_path, request):
    """Start one actor `a`, or those that the test asks for: `name` or `name*replicas`."""
    names = getattr(request, "param", "a").split()
    children = tuple(
        ChildSpec(id=name, actor=Worker, replicas=int(count or 1))
        for name, _, count in (each.partition("*") for each in names)
    )
    with Supervisor(SupervisorSpec(id="root", children=children), run_dir=tmp_path) as tree:
        yield tree


@pytest.fixture
def a(tree):
    return tree.ref("a", Worker)


@pytest.fixture
def gate(tree, tmp_path):
    """A file that actors may wait for; at the end of the test it is there."""
    gate = tmp_path / "gate"
    yield gate
    gate.touch()


@pytest.fixture
def replicas(tree):
    return [tree.ref(f"w/{index}", Worker) for index in range(3)]


@pytest.fixture
def stopped(tree):
    """Stop an actor's process in its tracks; it goes on after the test."""
    pids = []

    def stop(name):
        pids.append(tree.pid(name))
        os.kill(pids[-1], signal.SIGSTOP)

    yield stop
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def is_waiting(actor):
    return actor.control.status().result()["method"] == "wait_for"


def segments(tree):
    return [path.name for path in Path("/dev/shm").glob(f"rx-{tree.run_id}-*-bulk-*")]  # noqa: S108


# -- credit -----------------------------------------------------------------------------------------


def test_more_calls_than_credit_are_all_answered_in_order(a):
    replies = [a.ask(Worker.note_again, number) for number in range(500)]
    assert replies[-1].result() == list(range(500))


def test_a_sender_without_credit_waits_within_its_deadline(a, stopped):
    stopped("a")
    replies = [a.within(0.4).ask(Worker.note, number) for number in range(CREDIT_MESSAGES + 36)]
    outcomes = {reply.exception().executed for reply in replies}
    assert outcomes == {Executed.MAYBE, Executed.NO}
    assert replies[-1].exception().executed is Executed.NO


def test_a_tell_may_refuse_to_wait_for_room(a, stopped):
    stopped("a")
    for number in range(CREDIT_MESSAGES):
        a.tell(Worker.note, number, on_full="raise")
    with pytest.raises(MailboxFull):
        a.tell(Worker.note, CREDIT_MESSAGES, on_full="raise")


def test_a_full_mailbox_of_a_dead_actor_holds_nobody(tree, a, stopped):
    stopped("a")
    replies = [a.within(30).ask(Worker.note, number) for number in range(CREDIT_MESSAGES + 36)]
    os.kill(tree.pid("a"), signal.SIGKILL)
    errors = [reply.exception() for reply in replies]
    assert all(isinstance(error, ActorDied) for error in errors[:CREDIT_MESSAGES])
    assert errors[CREDIT_MESSAGES:] == [None] * 36  # they were never sent, so the next incarnation has them


def test_control_needs_no_credit(a, gate):
    a.tell(Worker.wait_for, str(gate))
    for number in range(CREDIT_MESSAGES + 100):
        a.tell(Worker.note, number)
    assert a.control.ping().result() > 0
    eventually(lambda: is_waiting(a))
    assert a.control.status().result()["mailbox_messages"] == CREDIT_MESSAGES - 1


@pytest.mark.fault
def test_idempotent_calls_are_sent_again_in_their_order(tree, a, stopped):
    stopped("a")
    replies = [a.ask(Worker.note_again, number) for number in range(CREDIT_MESSAGES + 50)]
    os.kill(tree.pid("a"), signal.SIGKILL)
    assert replies[-1].result() == list(range(CREDIT_MESSAGES + 50))


# -- cancellation -------------------------------------------------------------------------------------


def test_a_queued_call_that_is_cancelled_is_not_started(a, gate):
    a.tell(Worker.wait_for, str(gate))
    reply = a.ask(Worker.note, 1)
    assert reply.cancel()
    with pytest.raises(CancelledError):
        reply.result()
    a.control.ping().result()  # what was said before is heard before
    gate.touch()
    assert a.ask(Worker.notes).result() == []
    assert a.control.status().result()["dead_letters"] == {"cancelled": 1}


def test_a_running_call_can_see_that_it_is_cancelled(a):
    reply = a.ask(Worker.work_until_cancelled, 60.0)
    eventually(lambda: a.control.status().result()["method"] == "work_until_cancelled")
    reply.cancel()
    assert a.ask(Worker.what_was_noticed).result() == ["cancelled"]


def test_the_task_of_an_awaiting_call_is_cancelled(a):
    reply = a.ask(Worker.wait_until_cancelled, 60.0)
    eventually(lambda: a.control.status().result()["awaiting"] == 1)
    reply.cancel()
    eventually(lambda: a.ask(Worker.what_was_noticed).result() == ["task cancelled"])


def test_cancelling_an_await_cancels_the_call(a):
    async def give_up():
        waiting = asyncio.ensure_future(a.ask(Worker.wait_until_cancelled, 60.0))
        while not (await a.control.status())["awaiting"]:
            continue
        await asyncio.wait_for(waiting, 0.01)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(give_up())
    eventually(lambda: a.ask(Worker.what_was_noticed).result() == ["task cancelled"])


def test_a_call_that_waits_for_an_actor_can_be_cancelled(tree):
    reply = tree.ref("nobody", Worker).ask(Worker.notes)
    assert reply.cancel()
    assert reply.cancelled()


# -- the control lane -----------------------------------------------------------------------------------


def test_a_busy_actor_tells_its_stack_and_its_state(a, gate):
    a.tell(Worker.wait_for, str(gate))
    eventually(lambda: is_waiting(a))
    stack = a.control.stack().result()
    assert "sample_actors.wait_for(path)" in stack
    assert "MainThread" in stack
    assert a.control.status().result()["method_s"] > 0


def test_a_question_beside_a_main_thread_that_was_lively_just_now_is_answered(a, gate):
    for value in range(200):
        a.ask(Worker.echo, value).result()
    a.tell(Worker.wait_for, str(gate))
    eventually(lambda: is_waiting(a))
    assert a.control.ping().result() > 0


def test_dead_letters_are_kept_with_their_reason(a):
    a.tell(Worker.note, "no number")
    a.tell(Worker.fail_if, [0], "told")
    eventually(lambda: a.control.status().result()["dead_letters"] == {"arguments": 1, "raised": 1})
    letters = a.control.dead_letters().result()
    assert [(each["reason"], each["method"]) for each in letters] == [
        ("arguments", "note"),
        ("raised", "fail_if"),
    ]
    assert letters[0]["sender"] == "head#1"


def test_an_unknown_question_is_refused(tree):
    with pytest.raises(CallRefused, match="no query 'weather'"):
        tree._head.courier.caller.query("a", "weather", str, 5.0).result()


# -- circles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [["a"], ["b", "a"], ["b", "c", "a"]])
@pytest.mark.parametrize("tree", ["a b c"], indirect=True)
def test_a_circle_of_waits_is_named_long_before_the_deadline(a, path):
    with pytest.raises(DeadlockError, match=" -> ") as caught:  # and no CallTimeout
        a.ask(Worker.ask_sync, path).result()
    assert isinstance(caught.value, RemoteError)  # raised in the actor that closed the circle
    assert a.ask(Worker.echo, 1).result() == 1


@pytest.mark.parametrize("tree", ["a b c d"], indirect=True)
def test_a_chain_without_a_circle_is_no_circle(a):
    assert a.ask(Worker.ask_sync, ["b", "c", "d"]).result() == 3


@pytest.mark.parametrize("tree", ["a b"], indirect=True)
def test_an_await_keeps_the_mailbox_open(a):
    assert a.ask(Worker.ask_async, ["b", "a", "b", "a"]).result() == 4


# -- large frames -------------------------------------------------------------------------------------------


def test_large_arrays_travel_in_shared_memory_that_is_used_again(tree, a):
    array = np.ones(4 * MIB // 8)
    for _ in range(10):
        assert a.ask(Worker.total, array).result() == array.size
    assert 1 <= len(segments(tree)) <= 3
    assert tree._head.courier.status()["shared_segments"] <= 1


def test_an_array_over_the_limit_of_a_message_travels(a):
    array = np.arange(100 * MIB // 8, dtype=np.float64)
    doubled = a.ask(Worker.scale, array).result()
    assert doubled[-1] == 2 * array[-1]
    assert array[1] == 1  # the callee changed its own copy


def test_a_result_is_looked_at_in_place_for_as_long_as_it_is_kept(a):
    first = a.ask(Worker.ones, 2).result()
    second = a.ask(Worker.ones, 2).result()
    second[:] = 5
    assert first.sum() == first.size
    assert a.control.status().result()["shared_segments"] == 2
    del first, second
    eventually(lambda: a.control.status().result()["shared_segments"] == 0)


def test_an_argument_is_the_callees_for_as_long_as_it_keeps_it(tree, a):
    a.ask(Worker.keep, np.full(2 * MIB // 8, 7.0)).result()
    for _ in range(3):
        a.ask(Worker.total, np.zeros(2 * MIB // 8)).result()
    assert a.ask(Worker.drop).result() == 7.0
    eventually(lambda: tree._head.courier.status()["shared_segments"] == 0)


@pytest.mark.fault
def test_a_dead_receiver_frees_what_it_looked_at(tree, a):
    a.ask(Worker.keep, np.ones(2 * MIB // 8)).result()
    assert tree._head.courier.status()["shared_segments"] == 1
    os.kill(tree.pid("a"), signal.SIGKILL)
    eventually(lambda: tree._head.courier.status()["shared_segments"] == 0)


@pytest.mark.fault
def test_the_segments_of_the_dead_are_swept(tree, a):
    kept = a.ask(Worker.ones, 2).result()
    assert any("-a.1-" in name for name in segments(tree))
    os.kill(tree.pid("a"), signal.SIGKILL)
    eventually(lambda: not any("-a.1-" in name for name in segments(tree)))
    assert kept.sum() == kept.size  # a view outlives the name


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_an_array_for_many_is_written_once(tree, replicas):
    array = np.ones(4 * MIB // 8)
    assert gather(replicas, Worker.total, array).result() == [array.size] * 3
    assert len(segments(tree)) == 1


# -- fan-out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_results_come_in_the_order_of_the_refs(replicas, tmp_path):
    results = gather(replicas, Worker.replica_in_turn, str(tmp_path))
    for replica in (2, 1, 0):
        (tmp_path / f"{replica}").touch()
        replicas[replica].ask(Worker.notes).result()  # the others still wait
    assert results.result() == [0, 1, 2]
    assert gather([], Worker.notes).result() == []


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_a_stream_gives_the_quickest_first(replicas, tmp_path):
    results = iter(stream(replicas, Worker.replica_in_turn, str(tmp_path)))
    for replica in (2, 1, 0):
        (tmp_path / f"{replica}").touch()
        assert next(results) == (replica, replica)
    assert list(results) == []


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_a_stream_can_be_iterated_asynchronously(replicas, tmp_path):
    async def collect():
        quickest = iter("210")
        (tmp_path / next(quickest)).touch()
        found = []
        async for each in stream(replicas, Worker.replica_in_turn, str(tmp_path)):
            found.append(each)
            (tmp_path / next(quickest, "over")).touch()
        return found

    assert asyncio.run(collect()) == [(2, 2), (1, 1), (0, 0)]


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_errors_that_are_alike_are_one_with_their_ranks(replicas):
    with pytest.raises(MeshError) as caught:
        gather_all(replicas, Worker.fail_if, [0, 2], "boom").result()
    (error,) = caught.value.exceptions
    assert isinstance(error, ValueError)
    assert caught.value.ranks == ((0, 2),)
    assert "2 of 3 actors failed" in str(caught.value)
    assert error.__notes__ == ["of ranks 0, 2"]


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_the_first_failure_ends_a_gathering(replicas, gate):
    replicas[2].tell(Worker.wait_for, str(gate))
    eventually(lambda: is_waiting(replicas[2]))
    with pytest.raises(MeshError) as caught:
        gather(replicas, Worker.fail_if, [1], "boom").result()
    assert caught.value.ranks == ((1,),)
    assert caught.value.earliest == 1
    assert is_waiting(replicas[2])


@pytest.mark.parametrize("tree", ["w*3"], indirect=True)
def test_a_stream_raises_the_first_failure(replicas):
    with pytest.raises(MeshError):
        list(stream(replicas, Worker.fail_if, [0, 1, 2], "boom"))


@pytest.mark.parametrize("tree", ["a w*3"], indirect=True)
def test_an_actor_gathers_too(a):
    assert a.ask(Worker.gather_from, ["w/0", "w/1", "w/2"]).result() == [0, 1, 2]


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "type_name", "text"),
    [
        (Worker.fail_hugely, "builtins.ValueError", "the end"),
        (Worker.fail_recursively, "builtins.ValueError", "round"),
        (Worker.fail_deeply, "builtins.RuntimeError", "next"),
        (Worker.fail_as_if_refused, "msgspec.ValidationError", "mine"),
        (Worker.fail_unsendably, "call_actors.UnsendableError", "bad 1 2"),
        (Worker.fail_without_module, "nowhere.FleetingError", "gone"),
    ],
)
def test_no_exception_is_too_strange_to_be_told(a, method, type_name, text):
    with pytest.raises(RemoteError) as caught:
        a.ask(method).result()
    assert caught.value.type_name == type_name
    assert text in caught.value.message
    assert len(str(caught.value)) < 200_000
    assert a.ask(Worker.echo, 1).result() == 1


def test_a_result_that_is_no_data_is_the_callers_error(a):
    with pytest.raises(SerializationError, match="object"):
        a.ask(Worker.return_unsendable).result()


# -- threads ------------------------------------------------------------------------------------------------


def test_threads_that_wait_at_once_are_all_answered(a):
    results = []

    def ask(number):
        results.extend(a.ask(Worker.echo, number).result() for _ in range(200))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == sorted([0, 1, 2, 3] * 200)


def test_a_timeout_of_result_leaves_the_call_alive(a, gate):
    reply = a.ask(Worker.wait_for, str(gate))
    with pytest.raises(TimeoutError):
        reply.result(0.05)
    gate.touch()
    assert reply.result() is None


def test_a_call_after_the_tree_was_closed_ends_at_once(tmp_path):
    with Supervisor(SupervisorSpec(id="root", children=()), run_dir=tmp_path) as tree:
        early = tree.ref("a", Worker).ask(Worker.notes)
    with pytest.raises(ActorDied):
        early.result()
    with pytest.raises(ActorDied):
        tree.ref("a", Worker).ask(Worker.notes).result()


def test_no_call_ends_before_its_deadline(a, stopped):
    stopped("a")
    started = time.monotonic()
    with pytest.raises(CallTimeout):
        a.within(0.3).ask(Worker.notes).result()
    assert time.monotonic() - started >= 0.29  # deadlines are met by the bucket
