"""A host's complete versions within a budget; the rest is in test_dcs.py, through the publisher."""

import numpy as np
import pytest

from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.dcs.manifest import OWNER
from relax_actor.dcs.shelf import PolicyBudgetError, Shelf
from transport.shm import SegmentSpaceError, ShmSpace


@pytest.fixture
def space(tmp_path):
    return ShmSpace("run", tmp_path)


def weights(count, elements=1000):
    return [(f"t{index}", np.full(elements, index, np.int32)) for index in range(count)]


def used_bytes(space):
    return sum((space.root / name).stat().st_size for name in space.names(OWNER) if "manifest" not in name)


def versions(space):
    return sorted({int(name.partition(".")[2].partition("-")[0]) for name in space.names(OWNER)})


@pytest.mark.parametrize("settings", [{"keep": 0}, {"budget_bytes": -1}])
def test_senseless_settings_are_refused(space, settings):
    with pytest.raises(ValueError, match="must be at least"):
        Shelf(space, **settings)


def test_a_budget_below_one_version_names_what_it_needs_and_leaves_nothing(space):
    publisher = PolicyPublisher(space, bucket_bytes=9000, budget_bytes=10_000)
    with pytest.raises(PolicyBudgetError, match="policy version 0 needs 16384 bytes") as caught:
        publisher.publish(0, 0, weights(4))
    error = caught.value
    assert (error.version, error.held_bytes, error.budget_bytes) == (0, 0, 10_000)
    assert "dcs.budget_bytes" in str(error)
    assert space.names(OWNER) == []
    publisher.publish(1, 1, weights(2))
    assert versions(space) == [1]


def test_a_budget_below_two_versions_names_both_and_keeps_the_newest(space):
    publisher = PolicyPublisher(space, bucket_bytes=9000, budget_bytes=25_000)
    publisher.publish(0, 0, weights(4))
    with pytest.raises(PolicyBudgetError, match="beside the 16384 bytes of the version before"):
        publisher.publish(1, 1, weights(4))
    with PolicyReceiver(space).open() as snapshot:
        snapshot.verify()
        assert snapshot.version == 0


def test_fewer_versions_are_kept_before_anything_fails(space):
    publisher = PolicyPublisher(space, keep=4, bucket_bytes=9000, budget_bytes=40_000)
    for version in range(6):
        publisher.publish(version, version, weights(4))
        assert used_bytes(space) <= 40_000
    assert versions(space) == [4, 5]


def test_memory_of_another_size_is_given_back_before_a_version_is(space):
    publisher = PolicyPublisher(space, keep=2, bucket_bytes=9000, budget_bytes=36_000)
    publisher.publish(0, 0, weights(4))
    publisher.publish(1, 1, weights(4))
    publisher.publish(2, 2, weights(2, elements=1700))
    assert versions(space) == [1, 2]


def test_the_budget_holds_a_version_that_is_known_beforehand_against_the_newest_only(space):
    shelf = Shelf(space, budget_bytes=1000)
    shelf.check_budget(0, 1000)
    with pytest.raises(PolicyBudgetError):
        shelf.check_budget(0, 1001)
    Shelf.check_budget(shelf, 7, 10)
    shelf.close()
    unlimited = Shelf(space)
    unlimited.check_budget(0, 10**15)
    unlimited.close()


def test_a_full_file_system_costs_old_versions_but_not_the_newest(space, monkeypatch):
    publisher = PolicyPublisher(space, keep=3, bucket_bytes=9000)
    for version in range(3):
        publisher.publish(version, version, weights(4))
    made = space.create

    def create(owner, incarnation, label, nbytes):
        if used_bytes(space) + nbytes > 16384 * 2 and "manifest" not in label:
            raise SegmentSpaceError("x", space.root, nbytes, 0)
        return made(owner, incarnation, label, nbytes)

    monkeypatch.setattr(space, "create", create)
    publisher.publish(3, 3, weights(4, elements=800))
    assert versions(space) == [2, 3]
    with pytest.raises(SegmentSpaceError):
        publisher.publish(4, 4, weights(9, elements=900))
    assert versions(space) == [3]


def test_memory_of_a_version_given_up_is_used_again_and_shown_to_nobody(space):
    shelf = Shelf(space)
    staging = shelf.begin(0)
    staging.bucket(1, 4096)
    staging.bucket(0, 4096)
    staging.filled(0)
    inodes = {(space.root / name).stat().st_ino for name in space.names(OWNER)}
    staging.give_up()
    again = shelf.begin(1)
    again.bucket(0, 4096)
    assert (space.root / space.name(OWNER, 1, "b0")).stat().st_ino in inodes
    assert PolicyReceiver(space).latest() is None
    again.roll_back()
    shelf.close()
    assert space.names(OWNER) == []
