"""Checkpoint folders that are whole or do not count."""

import errno
import shutil
from typing import NamedTuple

import msgspec
import pytest

from relax_actor.faults import Fault, InjectedFaultError, arm, plan
from relax_actor.trainers.checkpoint import CheckpointError, CheckpointSpaceError, CheckpointStore
from relax_actor.trainers.checkpoint_manifest import MANIFEST, _sealed


class Usage(NamedTuple):
    """What shutil.disk_usage returns."""

    total: int
    used: int
    free: int


def writer(content: bytes = b"weights"):
    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(content)
        (folder / "state").write_bytes(b"state")

    return write


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def damage(path, how: str) -> None:
    weights = path / "model" / "weights"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif how == "altered":
        weights.write_bytes(b"x" + weights.read_bytes()[1:])
    elif how == "missing":
        weights.unlink()
    elif how == "no manifest":
        (path / MANIFEST).unlink()
    elif how == "torn manifest":
        (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:20])
    elif how == "altered manifest":
        (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes().replace(b'"step":2', b'"step":7'))
    elif how == "empty manifest":
        (path / MANIFEST).write_bytes(b"")


DAMAGES = {
    "truncated": "model/weights has 6 of 7 bytes",
    "altered": "model/weights was altered",
    "missing": "model/weights: No such file",
    "no manifest": "no readable manifest.json: No such file",
    "torn manifest": "torn or was altered",
    "altered manifest": "torn or was altered",
    "empty manifest": "torn or was altered",
}


def test_what_was_saved_is_found_with_its_step_and_meta(store):
    path = store.save(7, writer(), {"dataset": {"epoch": 1, "offset": 40}, "trained": [1, 2]})

    found = store.latest()

    assert (found.path, found.step) == (path, 7)
    assert found.meta == {"dataset": {"epoch": 1, "offset": 40}, "trained": [1, 2]}
    assert (path / "model" / "weights").read_bytes() == b"weights"
    assert store.open(path) == store.open(7) == found


def test_no_checkpoint_is_none_and_not_an_error(store):
    assert store.latest() is None
    assert store.ignored == {}


@pytest.mark.parametrize(("how", "reason"), DAMAGES.items())
def test_a_damaged_checkpoint_is_passed_over_with_a_reason(store, how, reason):
    whole = store.save(1, writer(), {})
    damaged = store.save(2, writer(), {})
    damage(damaged, how)

    assert store.latest().path == whole
    assert list(store.ignored) == [damaged]
    assert reason in store.ignored[damaged]
    with pytest.raises(CheckpointError, match="is not a whole checkpoint") as caught:
        store.open(2)
    assert reason in caught.value.reason


def test_only_damaged_checkpoints_are_none_with_a_reason_for_each(store):
    for step in (1, 2):
        damage(store.save(step, writer(), {}), "truncated")

    assert store.latest() is None
    assert len(store.ignored) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{}", "cannot be understood"), (b'{"format":9,"step":1,"files":{},"meta":{}}', "format 9")],
)
def test_a_manifest_of_another_version_is_refused_with_a_reason(store, content, reason):
    path = store.save(1, writer(), {})
    (path / MANIFEST).write_bytes(_sealed(content))

    with pytest.raises(CheckpointError, match=reason):
        store.open(path)


def test_the_oldest_are_removed_beyond_the_number_to_keep(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)

    paths = [store.save(step, writer(), {}) for step in (1, 2, 3)]

    assert sorted(tmp_path.iterdir()) == paths[1:]


def test_a_run_that_went_back_finds_its_own_checkpoints_not_the_future_it_left(store):
    for step in (5, 10):
        store.save(step, writer(), {})

    after = store.save(6, writer(b"other"), {})

    assert store.latest().path == after


def test_the_same_step_can_be_saved_again_and_the_newest_counts(store):
    store.save(4, writer(b"first"), {})
    again = store.save(4, writer(b"second"), {})

    assert store.latest().path == store.open(4).path == again


def test_a_step_is_not_found_by_its_last_digits(store):
    store.save(11, writer(), {})

    with pytest.raises(CheckpointError, match="no checkpoint of step 1 "):
        store.open(1)


def test_a_failed_write_leaves_nothing_and_raises_its_own_error(store, tmp_path):
    whole = store.save(1, writer(), {})

    def fail(folder):
        (folder / "half").write_bytes(b"half")
        raise OSError(errno.EIO, "broken disk")

    with pytest.raises(OSError, match="broken disk"):
        store.save(2, fail, {})

    assert [*whole.parent.iterdir()] == [whole]


def test_a_half_written_folder_of_a_dead_writer_does_not_count_and_is_removed(store):
    whole = store.save(1, writer(), {})
    partial = whole.parent / ".partial-000002"
    partial.mkdir()
    (partial / "half").write_bytes(b"half")

    assert store.latest().path == whole
    store.save(2, writer(), {})
    assert not partial.exists()


@pytest.mark.parametrize("name", ["checkpoint_file", "checkpoint_manifest", "checkpoint_rename"])
def test_an_error_at_any_point_leaves_the_previous_checkpoint(store, monkeypatch, name):
    whole = store.save(1, writer(), {})
    for key, value in plan([Fault(actor="trainer", point=name, action="raise")]).items():
        monkeypatch.setenv(key, value)
    arm("trainer", 1)

    with pytest.raises(InjectedFaultError):
        store.save(2, writer(), {})

    assert store.latest().path == whole
    assert [*whole.parent.iterdir()] == [whole]
    monkeypatch.undo()
    arm("trainer", 1)
    assert store.latest().path == whole
    assert store.save(2, writer(), {}) == store.latest().path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", [OSError, lambda number, _: RuntimeError(f"I/O error (os error {number})")])
def test_a_full_disk_is_told_as_such_however_the_library_says_it(store, kind, number):
    whole = store.save(1, writer(), {})

    def fail(_):
        raise kind(number, "full")

    with pytest.raises(CheckpointSpaceError, match="before this one are whole") as caught:
        store.save(2, fail, {})

    assert caught.value.need_bytes > caught.value.have_bytes
    assert store.latest().path == whole


def test_a_checkpoint_that_cannot_fit_is_refused_before_it_is_written(store, monkeypatch):
    """The next one is as large as the last; the disk's free space is the only thing made up here."""
    whole = store.save(1, writer(b"0" * 995), {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=2000, used=1001, free=999))

    with pytest.raises(CheckpointSpaceError, match=r"at least 1000 bytes in .* and 999 are free") as caught:
        store.save(2, lambda _: pytest.fail("it was written"), {})

    assert (caught.value.need_bytes, caught.value.have_bytes) == (1000, 999)
    assert store.latest().path == whole


def test_a_last_checkpoint_that_cannot_be_read_does_not_stop_the_next(store):
    damage(store.save(1, writer(), {}), "no manifest")

    assert store.save(2, writer(), {}) == store.latest().path


def test_the_name_of_the_manifest_is_reserved(store):
    with pytest.raises(ValueError, match=MANIFEST):
        store.save(1, lambda folder: (folder / MANIFEST).write_text("mine"), {})


def test_a_file_of_that_name_deeper_down_is_a_file_like_any_other(store):
    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / MANIFEST).write_text("mine")

    path = store.save(1, write, {})

    (path / "model" / MANIFEST).write_text("ours")
    assert store.latest() is None


def test_meta_that_is_not_plain_data_is_refused(store):
    with pytest.raises(TypeError):
        store.save(1, writer(), {"object": object()})

    assert store.latest() is None


def test_at_least_one_checkpoint_is_kept(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore(tmp_path, keep=0)


def test_a_foreign_folder_in_between_does_no_harm(store):
    path = store.save(1, writer(), {})
    (path.parent / "checkpoint-mine-step-3").mkdir()

    assert store.latest().path == path
    assert msgspec.json.decode((path / MANIFEST).read_bytes().splitlines()[0])["step"] == 1
