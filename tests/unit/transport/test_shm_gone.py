"""A folder of segments that is gone."""

from transport.shm import ShmSpace


def test_a_folder_that_is_gone_has_no_segments(tmp_path):
    space = ShmSpace("0011aabb", str(tmp_path / "gone"))
    assert space.names() == space.sweep() == []
