"""The status page: what is written is read, what was cut short is not believed, and `executed` is exact."""

import os
import threading

import pytest

from relax_actor.actor import page
from relax_actor.actor.page import PageState, PageView, PageWriter
from relax_actor.errors import Executed
from transport.segment import SegmentExistsError
from transport.shm import ShmSpace


@pytest.fixture
def space(tmp_path):
    return ShmSpace("testrun", tmp_path)


@pytest.fixture
def segment(space):
    return page.create(space, "rollout/3", 2)


@pytest.fixture
def writer(space, segment):
    return PageWriter(space, "rollout/3", 2, "cuda:5")


@pytest.fixture
def view(space):
    return lambda: PageView.read(space, "rollout/3", 2)


def dying(record):
    return page.dying("rollout/3", 2, "SIGKILL", record)


def executed(record, sender, call_id):
    return page.executed(dying(record), page.sender_key(*sender), call_id)


def test_an_actor_that_has_no_page_is_none(space):
    assert PageView.read(space, "nobody", 1) is None


def test_an_incarnation_has_one_page(space, segment):
    with pytest.raises(SegmentExistsError):
        page.create(space, "rollout/3", 2)


def test_a_page_says_nothing_before_its_actor_runs(segment, view):
    assert view() == page.PageRecord(incarnation=2)


def test_a_page_says_who_and_how_far(writer, view):
    writer.set_state(PageState.READY)
    writer.tick(3, 2)
    seen = view()
    assert (seen.pid, seen.incarnation, seen.state, seen.devices) == (os.getpid(), 2, "READY", "cuda:5")
    assert (seen.mailbox_messages, seen.tasks) == (3, 2)
    assert seen.tick_s > 0


def test_a_page_says_which_call_runs_and_forgets_it_when_it_is_over(writer, view):
    writer.begin("head", 1, 7, "generate")
    running = view()
    assert (running.method, running.call_id, running.calls_begun) == ("generate", 7, 1)
    assert running.call_sender == page.sender_key("head", 1)
    assert running.method_since_s > 0
    writer.end("head", 1, 7)
    over = view()
    assert (over.method, over.call_id, over.calls_begun) == ("", 0, 1)


def test_progress_is_cut_at_a_whole_character(writer, view):
    writer.progress("é" * 200)
    assert view().progress == "é" * 128
    writer.progress("")
    assert view().progress == ""


def test_a_call_that_did_not_begin_was_not_executed(writer, view):
    writer.begin("head", 1, 7, "add")
    assert executed(view(), ("head", 1), 8) is Executed.NO


def test_a_call_that_runs_may_have_been_executed(writer, view):
    writer.begin("head", 1, 7, "add")
    assert executed(view(), ("head", 1), 7) is Executed.MAYBE


def test_a_call_that_is_over_was_executed(writer, view):
    writer.begin("head", 1, 7, "add")
    writer.end("head", 1, 7)
    assert executed(view(), ("head", 1), 7) is Executed.DONE
    assert executed(view(), ("head", 1), 6) is Executed.MAYBE


def test_a_call_that_overtook_another_does_not_hide_it(writer, view):
    """An order other than that of the ids makes the answer vaguer, never wrong."""
    writer.begin("head", 1, 9, "add")
    writer.begin("head", 1, 7, "add")
    assert executed(view(), ("head", 1), 9) is Executed.MAYBE


def test_the_calls_of_each_incarnation_of_a_sender_are_told_apart(writer, view):
    writer.begin("relay", 1, 100, "add")
    writer.end("relay", 1, 100)
    assert executed(view(), ("relay", 2), 1) is Executed.NO
    assert executed(view(), ("relay", 1), 100) is Executed.DONE


def test_what_ends_without_a_beginning_leaves_no_trace(writer, view):
    writer.end("head", 1, 7)
    assert view().marks == ()


def test_more_senders_than_slots_make_the_answer_vaguer_never_wrong(writer, view):
    for index in range(page.SLOTS + 1):
        writer.begin(f"client/{index}", 1, 5, "add")
        writer.end(f"client/{index}", 1, 5)
    seen = view()
    assert len(seen.marks) == page.SLOTS
    assert not seen.marks_are_complete
    assert seen.state == "STARTING"
    assert executed(seen, ("client/0", 1), 5) is Executed.DONE
    assert executed(seen, (f"client/{page.SLOTS}", 1), 5) is Executed.MAYBE


def test_without_a_page_nothing_is_known_of_a_call():
    assert executed(None, ("head", 1), 1) is Executed.MAYBE


def test_a_write_that_a_death_cut_short_is_not_believed(writer, segment):
    writer.begin("head", 1, 7, "generate")
    writer.progress("half way")
    torn = bytearray(segment.buf)
    torn[192:200] = b"\xff" * 8  # the numbers at the front, without those at the end
    torn[320:328] = b"\xff" * 8
    looks = []
    seen = page.read(bytes(torn), lambda: looks.append(1) or bytes(torn))
    assert (seen.method, seen.progress) == ("", "")
    assert len(looks) == 3
    assert executed(seen, ("head", 1), 7) is Executed.MAYBE


def test_a_write_that_was_under_way_is_read_again(writer, segment):
    writer.begin("head", 1, 7, "generate")
    torn = bytearray(segment.buf)
    torn[192:200] = b"\xff" * 8
    assert page.read(bytes(torn), lambda: bytes(segment.buf)).method == "generate"


def test_what_is_no_page_is_not_read():
    assert page.read(bytes(page.PAGE_BYTES)) is None


def test_a_fork_of_an_actor_writes_to_no_page(writer, view):
    writer.begin("head", 1, 7, "generate")
    pid = os.fork()
    if pid == 0:
        writer.begin("head", 1, 8, "in_the_fork")
        writer.progress("in the fork")
        os._exit(0)
    os.waitpid(pid, 0)
    assert (view().method, view().progress) == ("generate", "")


def test_the_end_of_the_thread_that_holds_a_page_is_a_death(writer, segment):
    holder = threading.Thread(target=writer.hold)
    holder.start()
    holder.join()
    page.held(segment).wait()
    mutex = page.mutex(segment)
    assert mutex.lock()
    mutex.unlock()
    with pytest.raises(OSError, match="not recoverable"):
        mutex.lock()


def test_a_mutex_that_was_let_go_of_is_no_death(segment):
    mutex = page.mutex(segment)
    assert not mutex.lock()
    mutex.unlock()
    assert not mutex.lock()
    mutex.unlock()
