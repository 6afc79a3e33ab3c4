"""GPUs are claimed by locks that outlive their owner only in who inherited them."""

import os

import pytest

from relax_actor.roles.claims import NoFreeDeviceError, claim

GROUPS = [("cuda:1",), ("cuda:2",), ("cuda:3", "cuda:4")]


def test_a_replica_gets_its_own_devices_and_others_where_those_are_taken(tmp_path):
    assert claim(tmp_path, GROUPS, first=1).devices == GROUPS[1]
    assert claim(tmp_path, GROUPS, first=1).devices == GROUPS[2]
    assert claim(tmp_path, GROUPS, first=1).devices == GROUPS[0]
    with pytest.raises(NoFreeDeviceError, match=r"cuda:3, cuda:4"):
        claim(tmp_path, GROUPS, first=0)


def test_a_spare_begins_at_the_other_end(tmp_path):
    assert claim(tmp_path, GROUPS, first=-1).devices == GROUPS[2]


def test_devices_are_free_again_when_every_copy_of_the_lock_is_closed(tmp_path):
    taken = claim(tmp_path, GROUPS[:1], first=0)
    inherited = os.dup(taken.fd)
    os.close(taken.fd)
    with pytest.raises(NoFreeDeviceError):
        claim(tmp_path, GROUPS[:1], first=0)
    os.close(inherited)
    assert claim(tmp_path, GROUPS[:1], first=0).devices == GROUPS[0]
