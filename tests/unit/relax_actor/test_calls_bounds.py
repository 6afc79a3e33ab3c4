"""The pure parts of calls: deadlines, mailbox and credit, circles, shared slots, errors grouped."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.actor import cycles, failure
from relax_actor.actor.bulk import BULK_BYTES, BulkPool, BulkViews
from relax_actor.actor.convert import convert, signature_of
from relax_actor.actor.cycles import Circle, Wait
from relax_actor.actor.deadlines import BUCKET_S, Deadlines
from relax_actor.actor.fanout import mesh_error
from relax_actor.actor.mailbox import (
    CREDIT_BYTES,
    CREDIT_MESSAGES,
    MAILBOX_BYTES,
    MAILBOX_MESSAGES,
    DeadLetters,
    DeadReason,
    Incoming,
    Mailbox,
)
from relax_actor.actor.wire import BulkRef, Call, Probe
from relax_actor.errors import ActorDied, CallTimeout, Executed, MeshError, RemoteError
from relax_actor.ids import Holder
from transport.errors import CodecError
from transport.shm import ShmSpace

ME = Holder("me", 2)


# -- deadlines ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 100))
def test_a_deadline_is_seen_once_and_at_most_one_bucket_late(moments, now):
    deadlines = Deadlines()
    for key, moment in enumerate(moments):
        deadlines.add(key, moment)
    passed = deadlines.pop_passed(now)
    assert {key for key, moment in enumerate(moments) if moment <= now - BUCKET_S} <= set(passed)
    assert all(moments[key] <= now + 1e-9 for key in passed)
    assert sorted(passed + deadlines.pop_passed(1000.0)) == list(range(len(moments)))


def test_only_an_earlier_deadline_is_news():
    deadlines = Deadlines()
    assert deadlines.add("late", 5.0)
    assert not deadlines.add("later", 6.0)
    assert not deadlines.add("as late", 5.0)
    assert deadlines.add("early", 1.0)


def test_what_was_removed_never_passes():
    deadlines = Deadlines()
    deadlines.add("one", 1.0)
    deadlines.add("two", 2.0)
    deadlines.remove("one", 1.0)
    deadlines.remove("one", 1.0)
    deadlines.remove("unknown", 9.0)
    assert deadlines.first() == pytest.approx(2.0)
    assert deadlines.pop_passed(3.0) == ["two"]
    assert deadlines.first() is None


# -- mailbox --------------------------------------------------------------------------------------------


def incoming(number=1, *, peer=b"her#1", nbytes=10):
    call = Call(
        id=number, method="m", run_id="r", sender="her", sender_incarnation=1, to_incarnation=2, budget_s=1.0
    )
    return Incoming(call, [], peer, 0.0, nbytes)


@pytest.fixture
def given_back():
    return []


@pytest.fixture
def mailbox(given_back):
    return Mailbox(lambda peer, credit: given_back.append((peer, credit.messages, credit.bytes)))


def test_credit_goes_back_when_half_of_it_was_read(mailbox, given_back):
    for number in range(CREDIT_MESSAGES):
        assert mailbox.put(incoming(number))
    for _ in range(CREDIT_MESSAGES // 2 - 1):
        mailbox.take()
    assert given_back == []
    mailbox.take()
    assert given_back == [(b"her#1", CREDIT_MESSAGES // 2, 10 * CREDIT_MESSAGES // 2)]


def test_credit_in_bytes_goes_back_too(mailbox, given_back):
    mailbox.put(incoming(nbytes=CREDIT_BYTES // 2))
    mailbox.take()
    assert given_back == [(b"her#1", 1, CREDIT_BYTES // 2)]


def test_a_sender_that_is_gone_is_owed_nothing(mailbox, given_back):
    for number in range(CREDIT_MESSAGES // 2):
        mailbox.put(incoming(number))
        mailbox.take() if number else None
    mailbox.forget(b"her#1")
    mailbox.take()
    assert given_back == []


def test_a_mailbox_is_bounded_in_messages_and_in_bytes(mailbox):
    for number in range(MAILBOX_MESSAGES):
        assert mailbox.put(incoming(number))
    assert not mailbox.put(incoming())
    while mailbox:
        mailbox.take()
    assert mailbox.put(incoming(nbytes=2 * MAILBOX_BYTES))  # alone, however large
    assert not mailbox.put(incoming())


def test_a_waiting_message_is_found_by_sender_and_number(mailbox):
    mailbox.put(incoming(1))
    mailbox.put(incoming(2, peer=b"him#1"))
    assert mailbox.find(b"him#1", 2).call.id == 2
    assert mailbox.find(b"her#1", 2) is None


def test_dead_letters_are_counted_beyond_those_that_are_kept():
    letters = DeadLetters()
    for number in range(1100):
        letters.add(DeadReason.EXPIRED, incoming(number).call, "x" * 5000)
    assert letters.counts == {DeadReason.EXPIRED: 1100}
    assert len(letters.last) == 1024
    assert len(letters.last[0].detail) == 1000


# -- circles ----------------------------------------------------------------------------------------------

WAIT = Wait(callee="you", call_id=7)


def probe(**changes):
    facts = {"origin": "her#1", "wait_id": 3, "call_id": 5, "chain": ("her",)}
    return Probe(**(facts | changes))


def test_a_probe_goes_on_along_the_wait():
    onward = cycles.follow(probe(), ME, WAIT, is_open=True)
    assert onward == probe(call_id=7, chain=("her", "me"))


def test_a_probe_ends_where_nobody_waits_or_the_call_was_answered():
    assert cycles.follow(probe(), ME, None, is_open=True) is None
    assert cycles.follow(probe(), ME, WAIT, is_open=False) is None


def test_a_probe_that_comes_back_to_its_wait_is_a_circle():
    begun = cycles.begin(ME, WAIT)
    returned = probe(origin=begun.origin, wait_id=begun.wait_id, chain=(*begun.chain, "you"))
    assert cycles.follow(returned, ME, WAIT, is_open=True) == Circle(("me", "you", "me"))


def test_a_probe_of_an_earlier_wait_or_incarnation_is_no_circle():
    old = probe(origin="me#2", wait_id=6, chain=("me", "you"))
    assert cycles.follow(old, ME, WAIT, is_open=True) is None
    earlier = probe(origin="me#1", wait_id=7, chain=("me", "you"))
    assert cycles.follow(earlier, ME, WAIT, is_open=True) is None


# -- large frames -------------------------------------------------------------------------------------------


@pytest.fixture
def space(tmp_path):
    return ShmSpace("run", tmp_path)


def staged(pool, nbytes=BULK_BYTES, *, value=1, writable=True):
    return pool.stage([b"head", np.full(nbytes, value, np.uint8).data], writable=writable)


def test_small_values_are_part_of_the_record(space):
    ready = BulkPool(space, ME).stage([b"small"], writable=True)
    assert (ready.body, ready.frames, ready.refs, ready.inline_bytes) == (b"small", (), (), 5)


def test_without_shared_memory_every_frame_is_sent():
    ready = staged(BulkPool(None, ME))
    assert len(ready.frames) == 2
    assert ready.inline_bytes == 4 + BULK_BYTES


def test_a_large_frame_is_looked_at_in_place_and_its_segment_used_again(space):
    pool, released = BulkPool(space, ME), []
    views = BulkViews(ShmSpace("run", space.root), released.append)
    ready = staged(pool, value=9)
    ready.sent_to("her#1")
    ready.release()
    head, large = views.merge(ready.frames, ready.refs)
    assert (head, large[5], large.nbytes, large.readonly) == (b"head", 9, BULK_BYTES, False)
    assert pool.used_segments == 1
    part = large[3:8]
    del large
    gc.collect()
    assert released == []  # a part of it is looked at
    del part
    assert released == [ready.refs[0].segment]
    pool.release(released, "her#1")
    assert staged(pool).refs[0].segment == ready.refs[0].segment


def test_a_segment_in_use_is_not_written(space):
    pool = BulkPool(space, ME)
    first = staged(pool)
    assert staged(pool).refs[0].segment != first.refs[0].segment


def test_what_is_for_many_cannot_be_written_by_one(space):
    pool = BulkPool(space, ME)
    ready = staged(pool, writable=False)
    other = ready.share()
    ready.release()
    assert pool.used_segments == 1
    (_, large) = BulkViews(space, lambda _name: None).merge(other.frames, other.refs)
    assert large.readonly


def test_a_receiver_on_another_host_gets_frames(space):
    pool = BulkPool(space, ME)
    ready = staged(pool, value=3).without_shared_memory()
    assert [bytes(frame)[:2] for frame in ready.frames] == [b"he", b"\3\3"]
    assert (ready.refs, ready.inline_bytes) == ((), 4 + BULK_BYTES)
    assert pool.used_segments == 0
    assert ready.without_shared_memory() is ready
    far = pool.stage([b"head", bytes(BULK_BYTES)], writable=True, local=False)
    assert far.refs == ()


def test_a_receiver_that_is_gone_looks_at_nothing(space):
    pool = BulkPool(space, ME)
    ready = staged(pool)
    ready.sent_to("her#1")
    ready.sent_to("her#1")
    ready.release()
    pool.forget("her#1")
    assert pool.used_segments == 0
    pool.release(["unknown"], "her#1")


def test_no_room_in_shared_memory_means_frames(space, monkeypatch):
    monkeypatch.setattr(space, "create", lambda *_args: (_ for _ in ()).throw(OSError("full")))
    assert len(staged(BulkPool(space, ME)).frames) == 2


def test_segments_beyond_what_is_kept_are_removed(space, monkeypatch):
    monkeypatch.setattr("relax_actor.actor.bulk.KEPT_BYTES", 3 * 2**20)
    pool = BulkPool(space, ME)
    for each in [staged(pool), staged(pool)]:
        each.release()
    assert len(space.names()) == 1
    pool.close()
    assert space.names() == []


def test_the_views_of_a_dead_owner_are_forgotten_and_many_are_not_all_kept(space, monkeypatch):
    monkeypatch.setattr("relax_actor.actor.bulk.MAPPED_SEGMENTS", 1)
    pool = BulkPool(space, ME)
    views = BulkViews(space, lambda _name: None)
    for ready in [staged(pool), staged(pool)]:
        views.merge(ready.frames, ready.refs)
    assert len(views._mapped) == 1
    views.forget(Holder("other", 1))
    assert len(views._mapped) == 1
    views.forget(ME)
    assert not views._mapped


@pytest.mark.parametrize("root", [None, "there"])
def test_a_segment_that_is_not_there_is_a_malformed_message(space, root):
    views = BulkViews(space if root else None, lambda _name: None)
    missing = BulkRef(frame=0, segment=space.name("her", 1, "bulk-1"), nbytes=5, writable=True)
    with pytest.raises(CodecError):
        views.merge([], (missing,))


def test_a_frame_larger_than_its_segment_is_a_malformed_message(space):
    space.create("her", 1, "bulk-1", 100)
    wrong = BulkRef(frame=0, segment=space.name("her", 1, "bulk-1"), nbytes=500, writable=True)
    with pytest.raises(CodecError):
        BulkViews(space, lambda _name: None).merge([], (wrong,))


# -- errors -------------------------------------------------------------------------------------------------


def test_errors_are_grouped_by_what_happened_earliest_first():
    boom = [RemoteError(f"w/{rank}", "builtins.ValueError", "boom", "the same lines") for rank in range(3)]
    died = ActorDied("w/9", 1, "SIGKILL", Executed.MAYBE)
    late = CallTimeout("w/8", "echo", 1.0, Executed.MAYBE, "it was delivered")
    group = mesh_error([(9, died), (0, boom[0]), (2, boom[2]), (1, boom[1]), (8, late)], 12)
    assert group.ranks == ((9,), (0, 1, 2), (8,))
    assert group.earliest == 9
    assert [type(each) for each in group.exceptions] == [ActorDied, RemoteError, CallTimeout]
    assert boom[0].__notes__ == ["of ranks 0-2"]
    assert died.__notes__ == ["of rank 9"]


def test_a_part_of_a_group_keeps_its_ranks():
    died = ActorDied("w/1", 1, "SIGKILL", Executed.MAYBE)
    late = CallTimeout("w/0", "echo", 1.0, Executed.MAYBE, "it was delivered")
    timeouts, others = mesh_error([(1, died), (0, late)], 2).split(CallTimeout)
    assert isinstance(timeouts, MeshError)
    assert (timeouts.ranks, others.ranks) == (((0,),), ((1,),))


def test_a_text_that_is_too_long_keeps_both_its_ends():
    told = failure.describe(1, ValueError("begin" + "x" * 10**6 + "end")).message
    assert told.startswith("begin")
    assert told.endswith("end")
    assert "characters left out" in told
    assert len(told) < 70_000


# -- types ---------------------------------------------------------------------------------------------


class Sample:
    def plain(self, number: int, text: str = "") -> None: ...

    def many(self, *numbers: int) -> None: ...


def test_plain_values_of_their_own_type_pass_as_they_are():
    value = [1]
    assert convert(value, list) is value
    assert convert(1, float) == 1.0
    assert signature_of(Sample.plain).bind([1, "x"], {}) == ([1, "x"], {})
    assert signature_of(Sample.plain).bind([1], {"text": "x"}) == ([1, "x"], {})
    assert signature_of(Sample.many).bind([1, 2, 3], {}) == ([1, 2, 3], {})
    with pytest.raises(TypeError):
        signature_of(Sample.plain).bind([], {})
