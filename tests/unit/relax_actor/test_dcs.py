"""Policy versions in shared memory: whole or invisible, never changing while they are open."""

import itertools
import os
import struct
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_actor.dcs import (
    Dtype,
    Manifest,
    PolicyCorruptError,
    PolicyMissingError,
    PolicyPublisher,
    PolicyReceiver,
    PublisherActiveError,
)
from relax_actor.faults import VARIABLE, Action, Fault, InjectedFaultError, arm, plan
from relax_actor.ids import PolicyVersion
from transport.shm import SegmentSpaceError, ShmSpace, parse_name

PAIR_BYTES = 448  # a bucket of two of `policy`'s tensors: 192 bytes of head, 2 x 128 bytes
NUMPY_DTYPES = [d for d in Dtype if d not in (Dtype.BFLOAT16, Dtype.FLOAT8_E4M3FN, Dtype.FLOAT8_E5M2)]


@pytest.fixture
def space(tmp_path):
    return ShmSpace("0badcafe", tmp_path)


@pytest.fixture
def publisher(space):
    with PolicyPublisher(space, bucket_bytes=PAIR_BYTES) as made:
        yield made


@pytest.fixture
def receiver(space):
    return PolicyReceiver(space)


@pytest.fixture
def faults(monkeypatch):
    """Arm faults in this process; disarm them afterwards."""

    def armed(*planned):
        monkeypatch.setenv(VARIABLE, plan(list(planned))[VARIABLE])
        arm("trainer", 1)

    yield armed
    monkeypatch.delenv(VARIABLE, raising=False)
    arm("trainer", 1)


def policy(version, tensors=6):
    """Return weights that say which version they are of; a tensor is 128 bytes."""
    return [(f"layer.{i}", np.full(32, version * 100 + i, np.float32)) for i in range(tensors)]


def installed(snapshot):
    with snapshot:
        snapshot.verify()
        return {name: array.copy() for name, array in snapshot.arrays()}


def numbers(snapshot):
    return [array[0] for array in installed(snapshot).values()]


def versions_in(space):
    return sorted({parse_name(name).incarnation for name in space.names("dcs")})


def test_what_is_published_is_installed(publisher, receiver):
    manifest = publisher.publish(PolicyVersion(0), 0, policy(0))

    snapshot = receiver.open()

    assert receiver.latest() == publisher.latest() == snapshot.version == 0
    assert snapshot.manifest == manifest
    assert list(installed(snapshot)) == [f"layer.{i}" for i in range(6)]
    assert numbers(receiver.open(PolicyVersion(0))) == [0, 1, 2, 3, 4, 5]


def test_tensors_are_dealt_to_buckets_in_their_order(publisher):
    manifest = publisher.publish(
        PolicyVersion(3), 7, [*policy(3, 3), ("big", np.zeros(1000)), *policy(4, 1)][:4]
    )

    assert [(t.bucket, t.offset) for t in manifest.tensors] == [(0, 192), (0, 320), (1, 128), (2, 128)]
    assert [b.nbytes for b in manifest.buckets] == [192 + 256, 128 + 128, 128 + 8000]
    assert (manifest.step, manifest.nbytes) == (7, 832 + 8000)


def test_nothing_published_is_not_an_error_until_it_is_opened(receiver, space):
    assert receiver.latest() is None
    with pytest.raises(PolicyMissingError, match="nothing was published"):
        receiver.open()

    PolicyPublisher(space).publish(PolicyVersion(4), 0, policy(4))

    assert receiver.latest() == 4
    with pytest.raises(PolicyMissingError, match="policy version 5 is not in shared memory; the newest is 4"):
        receiver.open(PolicyVersion(5))


@pytest.mark.parametrize("version", [0, 4, 5])
def test_versions_never_go_back(publisher, space, version):
    publisher.publish(PolicyVersion(5), 0, policy(5))

    with pytest.raises(ValueError, match=f"policy version {version} is not higher than 5"):
        publisher.publish(PolicyVersion(version), 0, policy(version))
    publisher.close()
    with (
        PolicyPublisher(space) as successor,
        pytest.raises(ValueError, match=f"policy version {version} is not higher than 5"),
    ):
        successor.publish(PolicyVersion(version), 0, policy(version))


def test_versions_never_go_back_even_if_the_newest_was_lost(publisher, receiver, space):
    publisher.publish(PolicyVersion(5), 0, policy(5))
    publisher.close()
    space.sweep("dcs", 5)

    with PolicyPublisher(space) as successor:
        assert successor.latest() is None
        with pytest.raises(PolicyMissingError):
            receiver.open()
        with pytest.raises(ValueError, match="not higher than 5"):
            successor.publish(PolicyVersion(5), 0, policy(5))
        successor.publish(PolicyVersion(6), 0, policy(6))

    assert numbers(receiver.open())[0] == 600


def test_the_newest_two_versions_are_kept_and_memory_is_two_versions(publisher, receiver, space):
    for version in range(6):
        publisher.publish(PolicyVersion(version), version, policy(version))

    assert versions_in(space) == [4, 5]
    assert numbers(receiver.open(PolicyVersion(4)))[0] == 400
    with pytest.raises(PolicyMissingError):
        receiver.open(PolicyVersion(3))


def test_memory_nobody_reads_is_written_again(publisher, space, tmp_path):
    def inodes(version):
        return {(tmp_path / n).stat().st_ino for n in space.names("dcs", version) if "manifest" not in n}

    publisher.publish(PolicyVersion(0), 0, policy(0))
    old = inodes(0)
    publisher.publish(PolicyVersion(1), 0, policy(1))
    publisher.publish(PolicyVersion(2), 0, policy(2))

    assert inodes(2) == old
    publisher.close()
    with PolicyPublisher(space, bucket_bytes=PAIR_BYTES) as successor:
        successor.publish(PolicyVersion(3), 0, policy(3))
        successor.publish(PolicyVersion(4), 0, policy(4))
        assert inodes(4) == old


def test_what_is_open_never_changes(publisher, receiver, space):
    """The publisher goes on meanwhile, and the memory is freed in the end."""
    publisher.publish(PolicyVersion(0), 0, policy(0))
    snapshot = receiver.open()
    for version in range(1, 6):
        publisher.publish(PolicyVersion(version), version, policy(version))

    assert numbers(snapshot) == [0, 1, 2, 3, 4, 5]
    assert versions_in(space) == [4, 5]


def test_a_view_keeps_its_bytes_after_the_snapshot_is_closed(publisher, receiver):
    publisher.publish(PolicyVersion(0), 0, policy(0))
    with receiver.open() as snapshot:
        views = dict(snapshot.arrays())
    for version in range(1, 6):
        publisher.publish(PolicyVersion(version), version, policy(version))

    assert [view[0] for view in views.values()] == [0, 1, 2, 3, 4, 5]


def test_views_are_read_only(publisher, receiver):
    publisher.publish(PolicyVersion(0), 0, policy(0))
    with receiver.open() as snapshot:
        for _, array in snapshot.arrays():
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_a_single_version_can_be_kept(space, receiver):
    with PolicyPublisher(space, keep=1, bucket_bytes=PAIR_BYTES) as publisher:
        for version in range(4):
            publisher.publish(PolicyVersion(version), version, policy(version))
            with pytest.raises(PolicyMissingError):
                receiver.open(PolicyVersion(version - 1 if version else 9))
            assert numbers(receiver.open())[0] == version * 100


@pytest.mark.parametrize("sizes", [(6, 3), (3, 6), (6, 0), (0, 6)])
def test_weights_may_change_their_shape(publisher, receiver, space, sizes):
    for version in range(6):
        publisher.publish(PolicyVersion(version), version, policy(version, sizes[version % 2]))
        assert len(installed(receiver.open())) == sizes[version % 2]

    named = {name for version in (4, 5) for name in space.names("dcs", version)}
    assert set(space.names("dcs")) == named


@pytest.mark.parametrize("options", [{"keep": 0}, {"bucket_bytes": 0}])
def test_nonsense_is_refused(space, options):
    with pytest.raises(ValueError, match="at least 1"):
        PolicyPublisher(space, **options)


def test_there_is_one_publisher_at_a_time(publisher, space):
    with pytest.raises(PublisherActiveError, match="0badcafe"):
        PolicyPublisher(space)
    publisher.close()
    publisher.close()
    PolicyPublisher(space).close()


def test_a_publisher_that_died_while_it_made_the_word_is_followed(space, tmp_path, receiver):
    (tmp_path / "rx-0badcafe-dcs-latest.0-word").touch()
    assert receiver.latest() is None

    PolicyPublisher(space).publish(PolicyVersion(1), 0, policy(1))

    assert receiver.latest() == 1


@pytest.mark.parametrize("bucket", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 8, 100, 200, 447])
def test_a_flipped_byte_is_refused_by_bucket_and_version(publisher, receiver, space, bucket, position):
    publisher.publish(PolicyVersion(8), 0, policy(8))
    with space.attach(f"rx-0badcafe-dcs.8-b{bucket}", writable=True) as segment:
        segment.buf[position] ^= 1

    with receiver.open() as snapshot, pytest.raises(PolicyCorruptError) as caught:
        snapshot.verify()

    assert (caught.value.version, caught.value.bucket) == (8, bucket)
    assert caught.value.expected == snapshot.manifest.buckets[bucket].xxh3 != caught.value.found
    assert f"bucket {bucket} of policy version 8" in str(caught.value)


@pytest.mark.parametrize("left_bytes", [0, 1, 447, 449])
def test_a_bucket_of_another_length_is_refused_before_it_is_touched(
    publisher, receiver, tmp_path, left_bytes
):
    publisher.publish(PolicyVersion(8), 0, policy(8))
    os.truncate(tmp_path / "rx-0badcafe-dcs.8-b1", left_bytes)

    with pytest.raises(PolicyCorruptError, match=r"bucket 1 of policy version 8 .* expected 448 bytes"):
        receiver.open()


def test_a_bucket_cut_after_opening_is_refused_before_it_is_touched(publisher, receiver, tmp_path):
    publisher.publish(PolicyVersion(8), 0, policy(8))

    with receiver.open() as snapshot:
        os.truncate(tmp_path / "rx-0badcafe-dcs.8-b2", 10)
        with pytest.raises(PolicyCorruptError, match=r"bucket 2 .* expected 448 bytes, found 10"):
            snapshot.verify()


def test_a_missing_bucket_of_a_visible_version_is_corruption(publisher, receiver, space):
    publisher.publish(PolicyVersion(8), 0, policy(8))
    space.unlink("rx-0badcafe-dcs.8-b1")

    with pytest.raises(PolicyCorruptError, match="bucket 1"):
        receiver.open()


def test_a_manifest_says_what_is_wrong_with_it():
    good = Manifest(version=PolicyVersion(3), step=1, tensors=(), buckets=()).to_bytes()
    assert Manifest.from_bytes(good, PolicyVersion(3)).step == 1

    for bad, reason in [
        (b"", "at least"),
        (good[:10], "at least"),
        (b"X" + good[1:], "format 2"),
        (good[:8] + struct.pack("<I", 1) + good[12:], "format 1"),
        (good[:-1], f"{len(good) - 28} bytes, found {len(good) - 29}"),
        (good + b"\0", "bytes, found"),
        (good[:-1] + bytes([good[-1] ^ 1]), "found"),
    ]:
        with pytest.raises(PolicyCorruptError, match=reason) as caught:
            Manifest.from_bytes(bad, PolicyVersion(3))
        assert caught.value.bucket is None
    with pytest.raises(PolicyCorruptError, match="expected version 4, found version 3"):
        Manifest.from_bytes(good, PolicyVersion(4))


def test_a_version_with_a_damaged_manifest_is_refused_and_then_removed(publisher, receiver, space):
    publisher.publish(PolicyVersion(1), 0, policy(1))
    publisher.publish(PolicyVersion(2), 0, policy(2))
    publisher.close()
    with space.attach("rx-0badcafe-dcs.2-manifest", writable=True) as segment:
        segment.buf[40] ^= 1
    with pytest.raises(PolicyCorruptError, match="the manifest of policy version 2"):
        receiver.open()

    with PolicyPublisher(space) as successor:
        assert successor.latest() == 1

    assert versions_in(space) == [1]


def test_a_version_with_a_cut_bucket_is_removed_by_the_next_publisher(publisher, space, tmp_path):
    publisher.publish(PolicyVersion(2), 0, policy(2))
    publisher.close()
    os.truncate(tmp_path / "rx-0badcafe-dcs.2-b0", 9)

    with PolicyPublisher(space) as successor:
        assert successor.latest() is None

    assert versions_in(space) == []


@pytest.mark.parametrize("at", ["publish_bucket", "publish_manifest"])
def test_a_publish_that_fails_changes_nothing(publisher, receiver, space, faults, at):
    publisher.publish(PolicyVersion(0), 0, policy(0))
    faults(Fault(actor="trainer", point=at, action=Action.RAISE))

    with pytest.raises(InjectedFaultError):
        publisher.publish(PolicyVersion(1), 1, policy(1))

    assert versions_in(space) == [0]
    assert numbers(receiver.open())[0] == 0
    publisher.publish(PolicyVersion(1), 1, policy(1))
    assert numbers(receiver.open())[0] == 100


def test_a_version_nobody_was_told_of_is_complete_all_the_same(publisher, receiver, faults, space):
    publisher.publish(PolicyVersion(0), 0, policy(0))
    faults(Fault(actor="trainer", point="publish_latest", action=Action.RAISE))

    with pytest.raises(InjectedFaultError):
        publisher.publish(PolicyVersion(1), 1, policy(1))

    assert (receiver.latest(), publisher.latest()) == (0, 1)
    with pytest.raises(ValueError, match="not higher than 1"):
        publisher.publish(PolicyVersion(1), 1, policy(1))
    publisher.close()
    PolicyPublisher(space).close()
    assert receiver.latest() == 1


def test_weights_that_fail_half_way_change_nothing(publisher, receiver, space):
    publisher.publish(PolicyVersion(0), 0, policy(0))

    def broken():
        yield from policy(1)
        raise OSError("the optimizer has gone")

    with pytest.raises(OSError, match="optimizer"):
        publisher.publish(PolicyVersion(1), 1, broken())

    assert versions_in(space) == [0]
    assert receiver.latest() == 0


def test_a_name_that_comes_twice_is_refused(publisher, space):
    with pytest.raises(ValueError, match=r"`layer\.0` cannot be published: the name is taken"):
        publisher.publish(PolicyVersion(0), 0, [*policy(0), *policy(0)])

    assert versions_in(space) == []


@pytest.mark.parametrize(
    "value", [np.zeros(2, "c8"), np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, "f4,f4")], ids=str
)
def test_what_cannot_be_carried_is_refused_by_name(publisher, value):
    with pytest.raises(TypeError, match="`w` cannot be published"):
        publisher.publish(PolicyVersion(0), 0, [("w", value)])


def test_full_shared_memory_leaves_earlier_versions(receiver, tmp_path):
    space = ShmSpace(f"dcs{os.getpid()}")
    size_bytes = os.statvfs(space.root).f_blocks * os.statvfs(space.root).f_frsize
    huge = np.broadcast_to(np.uint8(1), (size_bytes + 4096,))
    try:
        with PolicyPublisher(space, bucket_bytes=PAIR_BYTES) as publisher:
            for version in range(3):
                publisher.publish(PolicyVersion(version), 0, policy(version))

            with pytest.raises(SegmentSpaceError) as caught:
                publisher.publish(PolicyVersion(3), 0, [*policy(3, 1), ("huge", huge)])

            assert caught.value.need_bytes == 128 + len(huge)
            assert PolicyReceiver(space).latest() == 2
            with pytest.raises(SegmentSpaceError):
                publisher.publish(PolicyVersion(3), 0, [("huge", huge)])
            publisher.publish(PolicyVersion(3), 0, policy(3))
            assert numbers(PolicyReceiver(space).open())[0] == 300
    finally:
        space.sweep()


def test_a_swept_run_can_be_published_into_again(publisher, space, receiver):
    for version in range(3):
        publisher.publish(PolicyVersion(version), 0, policy(version))
    space.sweep("dcs")

    publisher.publish(PolicyVersion(3), 0, policy(3))

    assert numbers(receiver.open())[0] == 300


def test_after_a_sweep_old_and_new_readers_are_told(publisher, space):
    publisher.publish(PolicyVersion(0), 0, policy(0))
    old, late = PolicyReceiver(space), PolicyReceiver(space)
    assert old.latest() == 0
    space.sweep()
    assert late.latest() is None

    publisher.publish(PolicyVersion(1), 0, policy(1))

    assert old.latest() == late.latest() == publisher.latest() == 1
    with pytest.raises(PublisherActiveError):
        PolicyPublisher(space)


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)).value)
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
    array = raw.view(dtype)[..., 0]
    return array.T if draw(st.booleans()) else array[..., ::-1] if shape else array


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(arrays(), max_size=8), min_size=1, max_size=4), st.integers(1, 1000))
def test_any_set_of_arrays_comes_back_bit_for_bit(space, publisher, receiver, sets, bucket_bytes):
    publisher._bucket_bytes = bucket_bytes
    for number, values in enumerate(sets, start=(publisher.latest() or 0) + 1):
        weights = [(f"w{i}", value) for i, value in enumerate(values)]
        manifest = publisher.publish(PolicyVersion(number), 0, weights)

        found = installed(receiver.open())

        assert list(found) == [name for name, _ in weights]
        assert [a.tobytes() for a in found.values()] == [v.tobytes() for v in values]
        assert [(a.dtype, a.shape) for a in found.values()] == [(v.dtype, v.shape) for v in values]
        assert all(t.offset % t.dtype.itemsize == 0 for t in manifest.tensors)
        for index, bucket in enumerate(manifest.buckets):
            assert bucket.nbytes <= bucket_bytes or sum(t.bucket == index for t in manifest.tensors) == 1


def test_torch_tensors_of_every_kind_come_back_bit_for_bit(publisher, receiver):
    import torch

    torch.manual_seed(0)
    matrix = torch.randn(5, 7)
    tied = torch.nn.Parameter(torch.randn(3, 3))
    weights = {
        "float32": matrix,
        "transposed": matrix.T,
        "strided": matrix[::2, 1::3],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "bfloat16": matrix.to(torch.bfloat16),
        "bfloat16.T": matrix.to(torch.bfloat16).T,
        "float16": matrix.to(torch.float16),
        "float8_e4m3fn": matrix.to(torch.float8_e4m3fn),
        "float8_e5m2": matrix.to(torch.float8_e5m2),
        "bool": matrix > 0,
        "int64": torch.arange(5),
        "scalar": torch.tensor(3.5),
        "scalar.bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "parameter": tied,
        "tied": tied,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    publisher.publish(PolicyVersion(0), 0, weights.items())

    with receiver.open() as snapshot:
        snapshot.verify()
        found = {name: tensor.clone() for name, tensor in snapshot.tensors()}
        raw = dict(snapshot.arrays())
        assert raw["bfloat16"].dtype == np.uint16

    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), expected), name


def test_a_torch_view_keeps_its_bytes_after_everything_is_closed(publisher, receiver):
    import torch

    publisher.publish(PolicyVersion(0), 0, policy(0))
    with receiver.open() as snapshot:
        views = dict(snapshot.tensors())
    del snapshot
    for version in range(1, 5):
        publisher.publish(PolicyVersion(version), version, policy(version))

    assert torch.equal(views["layer.5"], torch.full((32,), 5.0))


def test_sparse_tensors_are_refused(publisher):
    import torch

    with pytest.raises(TypeError, match="`w` cannot be published"):
        publisher.publish(PolicyVersion(0), 0, [("w", torch.eye(3).to_sparse())])
    with pytest.raises(TypeError, match="complex64"):
        publisher.publish(PolicyVersion(0), 0, [("w", torch.zeros(2, dtype=torch.complex64))])


def test_the_newest_version_can_always_be_opened_while_the_publisher_runs(space):
    """Recycling races with opening: a reader sees a whole version or a newer one, never a mixture."""
    finished = threading.Event()
    seen = []

    def read():
        receiver = PolicyReceiver(space)
        while not finished.is_set():
            if receiver.latest() is not None:
                values = numbers(receiver.open())
                assert values == [values[0] + i for i in range(len(values))]
                seen.append(values[0])

    reader = threading.Thread(target=read)
    with PolicyPublisher(space, keep=1, bucket_bytes=PAIR_BYTES) as publisher:
        reader.start()
        for version in itertools.count():
            publisher.publish(PolicyVersion(version), version, policy(version))
            if (version >= 150 and len(set(seen)) > 1) or not reader.is_alive():
                break
        finished.set()
        reader.join()

    assert seen == sorted(seen)
    assert len(set(seen)) > 1
