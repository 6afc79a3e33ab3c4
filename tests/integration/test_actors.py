"""Actors as OS processes: calls, errors, deadlines, deaths."""

import os
import signal

import numpy as np
import psutil
import pytest
from sample_actors import Counter, Relay
from watching import eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.errors import (
    ActorDied,
    ActorRestarted,
    CallRefused,
    CallTimeout,
    Executed,
    RemoteError,
    SerializationError,
)


@pytest.fixture
def tree(tmp_path):
    spec = SupervisorSpec(
        id="root",
        children=(
            ChildSpec(id="counter", actor=Counter, args={"start": 5}),
            ChildSpec(id="relay", actor=Relay),
        ),
    )
    with Supervisor(spec, run_dir=tmp_path) as tree:
        yield tree


@pytest.fixture
def counter(tree):
    return tree.ref("counter", Counter)


@pytest.fixture
def gate(tree, tmp_path):
    """A file that actors may wait for; at the end of the test it is there."""
    gate = tmp_path / "gate"
    yield gate
    gate.touch()


def test_an_endpoint_runs_in_its_own_process_and_keeps_its_state(tree, counter):
    assert counter.ask(Counter.add, 4).result() == 9
    assert counter.ask(Counter.add, 1).result() == 10
    pid, incarnation = counter.ask(Counter.where).result()
    assert pid != os.getpid()
    assert pid == tree.pid("counter")
    assert incarnation == 1


def test_calls_of_one_sender_keep_their_order(counter):
    replies = [counter.ask(Counter.add, 1) for _ in range(200)]
    assert [reply.result() for reply in replies] == list(range(6, 206))


def test_a_tell_is_carried_out_without_an_answer(counter):
    counter.tell(Counter.add, 10)
    assert counter.ask(Counter.add, 0).result() == 15


def test_an_actor_calls_another(tree):
    relay = tree.ref("relay", Relay)
    assert relay.ask(Relay.add_via, "counter", 7).result() == 12


def test_arrays_travel_both_ways(counter):
    doubled = counter.ask(Counter.double, np.arange(6, dtype=np.int32).reshape(2, 3)).result()
    assert doubled.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_an_error_keeps_its_type_its_text_and_its_traceback_and_the_actor_lives(counter):
    with pytest.raises(ValueError, match="boom") as caught:
        counter.ask(Counter.fail, "boom").result()
    assert isinstance(caught.value, RemoteError)
    assert caught.value.executed is Executed.DONE
    assert "raise ValueError(text)" in caught.value.remote_traceback
    assert counter.ask(Counter.add, 1).result() == 6


def test_an_error_that_is_made_in_its_own_way_reaches_the_caller(counter):
    with pytest.raises(MemoryError, match="too much"):
        counter.ask(Counter.run_out_of_memory, "too much").result()


def test_an_argument_of_another_type_is_refused_by_name(counter):
    with pytest.raises(CallRefused, match="Expected `int`, got `str`"):
        counter.ask(Counter.add, "four").result()


def test_an_argument_that_is_no_data_is_refused_before_it_is_sent(counter):
    with pytest.raises(SerializationError, match="object"):
        counter.ask(Counter.add, object())


def test_only_endpoints_can_be_called(counter):
    with pytest.raises(TypeError, match="not an @endpoint"):
        counter.ask(Counter.on_stop, "now")


def test_the_deadline_is_the_callers_alone(counter, gate):
    """A busy callee costs its caller the deadline and nothing more; the late answer is dropped."""

    def is_given_up_while_it_runs():
        with pytest.raises(CallTimeout) as caught:
            counter.within(0.2).ask(Counter.wait_for, str(gate)).result()
        assert caught.value.executed is Executed.MAYBE
        return counter.control.status().result()["method"] == "wait_for"

    eventually(is_given_up_while_it_runs)  # what comes too late is not even started
    gate.touch()
    assert counter.ask(Counter.add, 1).result() == 6


def test_a_message_that_waited_longer_than_its_caller_is_not_started(counter, gate):
    counter.tell(Counter.wait_for, str(gate))
    with pytest.raises(CallTimeout):
        counter.within(0.1).ask(Counter.add, 100).result()
    gate.touch()
    assert counter.ask(Counter.add, 0).result() == 5


@pytest.mark.fault
def test_a_stopped_callee_costs_the_deadline_and_starts_nothing_later_that_is_past_it(tree, counter):
    pid = tree.pid("counter")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeout):
            counter.within(0.3).ask(Counter.add, 100).result()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert counter.ask(Counter.add, 0).result() == 5


@pytest.mark.fault
def test_a_call_that_was_with_the_dead_says_that_it_may_have_run(counter):
    with pytest.raises(ActorDied) as caught:
        counter.ask(Counter.die).result()
    assert caught.value.executed is Executed.MAYBE
    assert caught.value.reason == "SIGKILL"


@pytest.mark.fault
def test_a_ref_follows_a_restart_and_a_pinned_one_does_not(counter):
    pinned = counter.pin()
    with pytest.raises(ActorDied):
        counter.ask(Counter.die).result()
    assert counter.ask(Counter.where).result()[1] == 2
    assert counter.ask(Counter.add, 0).result() == 5
    with pytest.raises(ActorRestarted):
        pinned.ask(Counter.add, 1).result()


@pytest.mark.fault
def test_an_idempotent_call_is_sent_again_to_the_next_incarnation(tree, counter):
    os.kill(tree.pid("counter"), signal.SIGSTOP)
    reply = counter.ask(Counter.where)
    os.kill(tree.pid("counter"), signal.SIGKILL)
    assert reply.result()[1] == 2


@pytest.mark.fault
def test_everybody_learns_who_is_gone(tree, counter):
    os.kill(tree.pid("relay"), signal.SIGKILL)
    eventually(lambda: counter.ask(Counter.peers_gone).result() == ["relay#1 SIGKILL"])


@pytest.mark.fault
def test_a_child_process_of_an_actor_dies_with_it(counter):
    child = counter.ask(Counter.spawn_child).result()
    with pytest.raises(ActorDied):
        counter.ask(Counter.die).result()
    eventually(lambda: not psutil.pid_exists(child))


def test_a_cancelled_reply_ends_at_once_and_the_next_call_is_answered(counter, gate):
    reply = counter.ask(Counter.wait_for, str(gate))
    assert reply.cancel()
    gate.touch()
    assert counter.ask(Counter.add, 1).result() == 6


async def _ask_async(counter):
    return await counter.ask(Counter.add, 2)


def test_a_reply_can_be_awaited(counter):
    import asyncio

    assert asyncio.run(_ask_async(counter)) == 7
