"""Whom a store pulls from, and what becomes of a version half way."""

import pytest

from relax_actor.dcs.manifest import BucketEntry, Manifest
from relax_actor.dcs.relay import chain
from relax_actor.dcs.relay.chain import Chain, Haul, is_overtaken
from relax_actor.dcs.relay.records import Alive, Follow, RelayError, encode, read_down, read_up
from relax_actor.ids import PolicyVersion


def haul_of(*sizes):
    buckets = tuple(BucketEntry(nbytes=size, xxh3="0" * 16) for size in sizes)
    return Haul(Manifest(version=PolicyVersion(3), step=3, tensors=(), buckets=buckets))


def test_the_nearest_store_is_pulled_from():
    assert Chain(["a", "b", "c"], suspect_s=1.0).upstream(0.0) == "c"


def test_a_suspected_store_is_skipped_until_the_suspicion_ends():
    before = Chain(["a", "b", "c"], suspect_s=1.0)
    assert before.suspect("c", 10.0)
    assert before.upstream(10.9) == "b"
    assert before.upstream(11.0) == "c"


def test_the_first_store_is_never_given_up():
    before = Chain(["a", "b"], suspect_s=1.0)
    assert before.suspect("b", 0.0)
    assert not before.suspect("a", 0.0)
    assert before.upstream(0.5) == "a"


def test_each_further_failure_in_a_row_is_suspected_twice_as_long_up_to_a_limit():
    before, now, lasted = Chain(["a", "b"], suspect_s=1.0), 0.0, []
    for _ in range(8):
        before.suspect("b", now)
        lasted.append(next(s for s in range(1, 100) if before.upstream(now + s) == "b"))
        now += 100
    assert lasted == [1, 2, 4, 8, 16, 32, 32, 32]


def test_a_whole_version_makes_up_for_failures():
    before = Chain(["a", "b"], suspect_s=1.0)
    before.suspect("b", 0.0)
    before.suspect("b", 0.0)
    before.trust("b")
    assert before.upstream(0.0) == "b"
    before.suspect("b", 0.0)
    assert before.upstream(1.0) == "b"


def test_epochs_only_rise():
    before = Chain(["a"], suspect_s=1.0)
    assert [before.next_epoch() for _ in range(3)] == [1, 2, 3]


def test_the_first_store_has_no_chain():
    with pytest.raises(ValueError, match="nobody to pull from"):
        Chain([], suspect_s=1.0)


@pytest.mark.parametrize(
    ("here", "newer", "skipped", "gives_way"),
    [(49, True, False, True), (50, True, False, False), (0, False, False, False), (0, True, True, False)],
)
def test_a_version_gives_way_below_half_to_a_complete_one_and_not_twice_in_a_row(
    here, newer, skipped, gives_way
):
    found = is_overtaken(here_bytes=here, total_bytes=100, newer_is_complete=newer, skipped_the_last=skipped)
    assert found is gives_way


def test_buckets_are_asked_for_in_order_and_two_ahead_at_least(monkeypatch):
    monkeypatch.setattr(chain, "AHEAD_BYTES", 10)
    haul = haul_of(100, 100, 100)
    assert haul.wants() == [0, 1]
    assert haul.wants() == []
    haul.arrived()
    assert haul.wants() == [2]


def test_small_buckets_are_asked_for_further_ahead(monkeypatch):
    monkeypatch.setattr(chain, "AHEAD_BYTES", 10)
    assert haul_of(*[3] * 9).wants() == [0, 1, 2, 3]


def test_only_the_next_bytes_of_the_expected_bucket_are_taken():
    haul = haul_of(100, 50)
    assert haul.left_bytes(0, 0) == 0
    haul.wants()
    assert haul.left_bytes(0, 0) == 100
    assert haul.left_bytes(1, 0) == 0
    haul.received(60)
    assert haul.left_bytes(0, 0) == 0
    assert haul.left_bytes(0, 60) == 40
    haul.received(40)
    haul.arrived()
    assert (haul.here_bytes, haul.is_complete) == (100, False)
    assert haul.left_bytes(1, 0) == 50
    haul.arrived()
    assert (haul.here_bytes, haul.is_complete) == (150, True)


def test_a_damaged_bucket_is_asked_for_once_more():
    haul = haul_of(100, 50, 10)
    haul.wants()
    assert haul.damaged()
    assert haul.wants() == [0]
    assert haul.left_bytes(1, 0) == 50
    haul.arrived()
    haul.arrived()
    assert not haul.damaged()
    assert not haul.is_complete


def test_on_another_link_everything_missing_is_asked_for_anew_and_damages_are_forgotten():
    haul = haul_of(100, 50, 10)
    haul.wants()
    haul.arrived()
    haul.received(20)
    assert haul.damaged()
    haul.relinked()
    assert haul.wants() == [1, 2]
    assert haul.left_bytes(1, 0) == 50
    assert haul.damaged()
    assert haul.version == 3


def test_what_nobody_says_is_an_error_that_names_who_said_it():
    follow, alive = Follow(epoch=2, have=None), Alive(epoch=2)
    assert read_up(encode(follow), "b") == follow
    assert read_down(encode(alive), "a") == alive
    for read, said in ((read_up, alive), (read_down, follow)):
        with pytest.raises(RelayError, match="the link with x carried what nobody says"):
            read(encode(said), "x")
    with pytest.raises(RelayError):
        read_down(b"\xc1", "x")


def test_buckets_that_come_without_being_asked_for_are_not_asked_for():
    haul = haul_of(100, 200, 300)
    assert haul.lacks(1)
    haul.came(1)
    assert (haul.lacks(1), haul.here_bytes) == (False, 200)
    assert haul.wants() == [0, 2]
    assert not haul.lacks(0)
    haul.relinked()
    assert haul.lacks(0)
    haul.came(0)
    haul.came(2)
    assert haul.is_complete
