"""Small files of a run folder that are whole or not there."""

from relax_actor.files import replace_text
from relax_actor.roles import verdict


def test_a_text_is_replaced_as_a_whole_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "note"
    replace_text(path, "a longer one")
    replace_text(path, "short")
    assert path.read_text() == "short"
    assert [each.name for each in tmp_path.iterdir()] == ["note"]


def test_a_text_with_a_lone_surrogate_is_escaped(tmp_path):
    replace_text(tmp_path / "note", "a\ud83d")
    assert (tmp_path / "note").read_text() == "a\\ud83d"


def test_a_failed_run_leaves_a_verdict_until_the_next_one_begins(tmp_path):
    assert verdict.find(tmp_path) == ""
    verdict.leave(tmp_path, "no reward for anybody")
    assert verdict.find(tmp_path) == "no reward for anybody"
    verdict.clear(tmp_path)
    verdict.clear(tmp_path)
    assert verdict.find(tmp_path) == ""
