"""The GPU routes' decisions, without processes: ring, fold, plans, page-locked segments, snapshots."""

import pytest
import torch
from fake_gpus import FakeGpus
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actor.dcs.cuda.device import DeviceError, UnknownDeviceError
from relax_actor.dcs.cuda.fold import ROW_WORDS, digest, fold
from relax_actor.dcs.cuda.packing import Plan
from relax_actor.dcs.cuda.pinned import PinnedPool
from relax_actor.dcs.cuda.ring import PAGE_BYTES, Failure, Move, Page, Ring, chunks
from relax_actor.dcs.cuda.slots import OpenedSlots, SlotStock
from relax_actor.dcs.cuda.snapshot import SnapshotReader, SnapshotWriter, starts_of
from relax_actor.dcs.latest import PublisherActiveError
from relax_actor.devices import host_gpus, rollout_device, trainer_device
from transport.shm import SegmentMissingError, ShmSpace


@pytest.fixture
def space(tmp_path):
    return ShmSpace("cuda", tmp_path)


@pytest.fixture
def gpus(tmp_path):
    root = tmp_path / "gpus"
    root.mkdir()
    return FakeGpus(root)


# -- ring ---------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 100), max_size=8), slot=st.integers(1, 40))
def test_chunks_cover_every_bucket_once_and_in_order(sizes, slot):
    cut = list(chunks(sizes, slot))
    assert all(chunk.nbytes <= slot for chunk in cut)
    for bucket, size in enumerate(sizes):
        mine = [chunk for chunk in cut if chunk.bucket == bucket]
        ends = [chunk.start + chunk.nbytes for chunk in mine]
        assert [chunk.start for chunk in mine] == [0, *ends[:-1]]
        assert ends[-1] == size
        assert len(mine) == 1 or size > slot


@settings(max_examples=200)
@given(data=st.data(), count=st.integers(0, 9), slots=st.integers(1, 3))
def test_a_slot_is_never_filled_before_its_reader_has_done_with_it(data, count, slots):
    """Whatever the order in which GPU and reader get on, all chunks pass, and none is overwritten."""
    ring, done_with = Ring(count, slots), 0
    for _ in range(200):
        move = ring.move(done_with)
        if move is Move.END:
            break
        can_read = done_with < ring.filled
        if move is Move.LAUNCH:
            ring.launched += 1
        elif move is Move.ANNOUNCE and (not can_read or data.draw(st.booleans())):
            ring.filled += 1
        elif can_read:
            done_with += 1
        assert done_with <= ring.filled <= ring.launched <= done_with + slots
    assert done_with == count


def test_a_page_carries_counts_and_a_failure_to_the_other_side(space):
    segment = space.create("page", 0, "p", PAGE_BYTES)
    ours, theirs = Page(segment), Page(space.attach(segment.name, writable=True))
    ours.filled, theirs.done_with = 3, 2
    assert (theirs.filled, ours.done_with, theirs.failure()) == (3, 2, None)
    ours.fail(Failure(reason="x" * 2 * PAGE_BYTES, bucket=4, expected="a", found="b"))
    failure = theirs.failure()
    assert (failure.bucket, failure.expected, failure.found, failure.reason) == (4, "a", "b", "x" * 1000)
    ours.close()
    theirs.close()


# -- fold ---------------------------------------------------------------------------------------


def reference_fold(data):
    columns, rows = weights_of(len(data))
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return sum(word * (columns[i % ROW_WORDS] + rows[i // ROW_WORDS]) for i, word in enumerate(words)) % 2**64


def weights_of(nbytes):
    from relax_actor.dcs.cuda.fold import _weights

    columns, rows = _weights("cpu")
    needed = nbytes // 8 // ROW_WORDS + 1
    return columns.tolist(), rows[:needed].tolist()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 4096, ROW_WORDS * 8 - 1, ROW_WORDS * 8, ROW_WORDS * 16 + 13])
def test_a_fold_is_the_weighted_sum_of_all_words(nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert digest(int(fold(data))) == f"{reference_fold(bytes(data.tolist())):016x}"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_fold_shows_a_changed_byte_and_an_exchange(data):
    size = data.draw(st.sampled_from([8, 100, ROW_WORDS * 8 + 40]))
    original = torch.arange(size).mul(2654435761).remainder(251).to(torch.uint8)
    changed = original.clone()
    at = data.draw(st.integers(0, size - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    assert int(fold(changed)) != int(fold(original))
    words = original[: size // 8 * 8].view(torch.int64)
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = original.clone()
    swapped[: size // 8 * 8].view(torch.int64)[[i, j]] = words[[j, i]]
    assert (int(fold(swapped)) == int(fold(original))) == (words[i] == words[j]).item()


# -- packing ------------------------------------------------------------------------------------


def test_a_plan_is_one_of_the_same_names_shapes_and_types_only():
    weights = [("a", torch.zeros(3)), ("b", torch.zeros(2, dtype=torch.int64))]
    plan = Plan(weights, 1 << 20, torch.bfloat16)
    assert plan.fits([("a", torch.ones(3)), ("b", torch.ones(2, dtype=torch.int64))])
    assert not plan.fits([("a", torch.ones(4)), weights[1]])
    assert not plan.fits([("a", torch.ones(3, dtype=torch.float64)), weights[1]])
    assert not plan.fits(weights[:1])
    assert [placed.dtype for placed in plan.buckets[0].tensors] == ["bfloat16", "int64"]


def test_a_packed_bucket_is_the_safetensors_file_that_it_says(tmp_path):
    from safetensors.torch import load_file

    weights = [("a", torch.randn(5, 3).t()), ("n", torch.arange(7)), ("z", torch.zeros(0, 2))]
    plan = Plan(weights, 1 << 20, torch.bfloat16)
    data = torch.zeros(plan.bucket_bytes[0], dtype=torch.uint8)
    plan.places(0, data).pack(weights)
    (tmp_path / "b.safetensors").write_bytes(bytes(data.tolist()))
    read = load_file(tmp_path / "b.safetensors")
    assert torch.equal(read["a"], weights[0][1].to(torch.bfloat16))
    assert torch.equal(read["n"], weights[1][1])
    assert read["z"].shape == (0, 2)


# -- page-locked segments -----------------------------------------------------------------------


def test_a_segment_is_page_locked_once_under_all_its_names(space, gpus):
    pool = PinnedPool(space, gpus)
    with space.create("dcs", 0, "b0", 4096) as segment:
        name = segment.name
    assert not pool.get(name).is_pinned
    first = pool.get(name).data()
    renamed = space.rename(name, "dcs", 1, "b3")
    assert pool.get(renamed).data().data_ptr() == first.data_ptr()
    assert len(gpus.pinned) == 1
    assert pool.trim("dcs") == 0
    space.unlink(renamed)
    assert pool.trim("dcs") == 1
    assert (len(pool), gpus.pinned) == (0, {})
    with pytest.raises(SegmentMissingError):
        pool.get(renamed)


def test_a_closed_pool_has_nothing_page_locked(space, gpus):
    pool = PinnedPool(space, gpus)
    with space.create("dcs", 0, "b0", 4096) as segment:
        held = pool.get(segment.name)
    held.data()
    pool.close()
    assert gpus.pinned == {}
    with pytest.raises(ValueError, match="closed"):
        held.data()


# -- slots --------------------------------------------------------------------------------------


def test_a_ring_is_kept_for_the_next_transfer(gpus):
    stock = SlotStock(gpus, slot_bytes=1 << 20, slots=2)
    first, second = stock.take("GPU-a", 1000), stock.take("GPU-a", 1000)
    assert first.slot_bytes == 1024
    assert set(first.handles).isdisjoint(second.handles)
    stock.put_back(first)
    assert stock.take("GPU-a", 1 << 30) is first
    stock.put_back(first)
    stock.put_back(second)
    stock.close()
    assert list(gpus.root.iterdir()) == []


def test_a_gpu_without_room_leaves_no_half_ring(gpus):
    stock = SlotStock(FakeGpus(gpus.root, capacity=1500), slot_bytes=1 << 20, slots=2)
    with pytest.raises(DeviceError, match="1024 bytes on GPU-a failed: out of memory"):
        stock.take("GPU-a", 1000)
    assert list(gpus.root.iterdir()) == []
    with pytest.raises(UnknownDeviceError, match="GPU-z is not one of those"):
        stock.take("GPU-z", 1000)


def test_opened_slots_are_opened_once(gpus):
    stock = SlotStock(gpus, slot_bytes=512, slots=2)
    slots = stock.take("GPU-a", 512)
    opened = OpenedSlots(gpus, "GPU-a")
    first = opened.open(slots.handles, 512)
    first[0][0] = 7
    assert slots[0][0] == 7
    assert opened.open(slots.handles, 512)[0].data_ptr() == first[0].data_ptr()
    with pytest.raises(DeviceError):
        opened.open((b"GPU-a.1.gone",), 512)
    opened.close()


# -- snapshots ----------------------------------------------------------------------------------


def test_buckets_begin_where_copies_are_quick():
    assert starts_of([1, 512, 513]) == ((0, 512, 1024), 2048)


def test_a_version_is_read_where_it_was_offered_until_its_buffer_is_taken(space, gpus):
    writer = SnapshotWriter(space, gpus, "GPU-a", [10, 20])
    reader = SnapshotReader(space, FakeGpus(gpus.root, ("GPU-b", "GPU-a")))
    assert reader.lease(0) is None
    for version in range(3):
        buffer = writer.take()
        buffer.buckets[1].fill_(version)
        buffer.offer(version)
    assert reader.lease(0) is None
    for version in (1, 2):
        lease = reader.lease(version)
        assert reader.bucket(lease.record, 1, 20).tolist() == [version] * 20
        lease.close()
    reader.close()
    writer.close()
    assert list(gpus.root.iterdir()) == []


def test_a_buffer_with_readers_is_passed_over(space, gpus):
    writer, reader = SnapshotWriter(space, gpus, "GPU-a", [10]), SnapshotReader(space, gpus)
    for version in range(2):
        writer.take().offer(version)
    old, new = reader.lease(0), reader.lease(1)
    assert writer.take() is None
    new.close()
    buffer = writer.take()
    buffer.release()
    assert reader.lease(1) is None  # what was begun is not offered any more
    old.close()
    writer.close()


def test_the_memory_of_a_publisher_that_has_ended_is_let_go_of(space, gpus):
    writer, reader = SnapshotWriter(space, gpus, "GPU-a", [10]), SnapshotReader(space, gpus)
    with pytest.raises(PublisherActiveError):
        SnapshotWriter(space, gpus, "GPU-a", [10])
    writer.take().offer(0)
    lease = reader.lease(0)
    reader.bucket(lease.record, 0, 10)
    lease.close()
    assert reader.forget_dead() == 0
    writer.close()
    assert reader.lease(0) is None
    successor = SnapshotWriter(space, gpus, "GPU-a", [10])
    assert reader.forget_dead() == 1
    assert reader.forget_dead() == 0
    successor.close()


# -- who computes where -------------------------------------------------------------------------


def test_gpus_are_counted_by_their_device_files(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert host_gpus({}, tmp_path) == 2
    assert host_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert host_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert host_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


@pytest.mark.parametrize(
    ("setting", "gpus", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
    ],
)
def test_the_trainer_has_the_first_gpu(setting, gpus, expected):
    assert trainer_device(setting, gpus) == expected


@pytest.mark.parametrize(
    ("setting", "gpus", "expected"),
    [
        ("auto", 0, ["cpu", "cpu"]),
        ("cuda", 0, ["cuda:0", "cuda:0"]),
        ("auto", 1, ["cuda:0", "cuda:0"]),
        ("auto", 3, ["cuda:1", "cuda:2"]),
        ("cuda", 2, ["cuda:1", "cuda:1"]),
        ("cuda:0", 4, ["cuda:0", "cuda:0"]),
    ],
)
def test_rollouts_take_the_other_gpus_in_turn(setting, gpus, expected):
    assert [rollout_device(setting, replica, gpus) for replica in range(2)] == expected
