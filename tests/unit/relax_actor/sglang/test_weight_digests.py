"""Replicas agree on what they have installed."""

from pathlib import Path

import pytest

from relax_actor.engines.sglang.weights.errors import DigestError
from relax_actor.engines.sglang.weights.verify import KEEP_VERSIONS, Digests, digest_of, topology
from relax_actor.ids import PolicyVersion

V = PolicyVersion


def test_the_first_writes_and_the_others_compare(tmp_path: Path):
    first, second = Digests(tmp_path / "digests", "t"), Digests(tmp_path / "digests", "t")
    first.agree(V(3), "aa")
    second.agree(V(3), "aa")

    with pytest.raises(DigestError) as caught:
        second.agree(V(3), "bb")

    assert (caught.value.expected, caught.value.found, caught.value.version) == ("aa", "bb", 3)


def test_other_topologies_are_not_compared(tmp_path: Path):
    Digests(tmp_path, "one").agree(V(3), "aa")
    Digests(tmp_path, "two").agree(V(3), "bb")


def test_old_versions_are_forgotten(tmp_path: Path):
    digests = Digests(tmp_path, "t")
    for number in range(KEEP_VERSIONS + 5):
        digests.agree(V(number), "aa")

    assert len(list(tmp_path.iterdir())) == KEEP_VERSIONS


def test_a_topology_is_a_file_name():
    assert topology((0, 5, 23), 2, Path("/models/Qwen 3/4B~x")) == "sglang-0.5.23-ranks2-4B_x"
    assert topology((0, 5, 17), 1, None) == "sglang-0.5.17-ranks1"


def test_a_server_without_a_digest_is_in_doubt():
    assert digest_of({"per_engine_checksum": "aa"}) == "aa"
    for answer in ({"success": True}, "Cache flushed.", {"per_engine_checksum": ""}):
        with pytest.raises(ValueError, match="no digest"):
            digest_of(answer)
