"""A bucket is a `.safetensors` file as it lies: what the reference reader makes of it."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from relax_actor.dcs import Dtype, PolicyPublisher, PolicyReceiver
from relax_actor.dcs.header import (
    ALIGN_BYTES,
    RESERVED,
    Described,
    entry_bound_bytes,
    head_and_offsets,
    head_bound_bytes,
)
from relax_actor.ids import PolicyVersion
from transport.shm import ShmSpace

KIB = 1024


@pytest.fixture
def space(tmp_path):
    return ShmSpace("0badcafe", tmp_path)


@pytest.fixture
def read_back(space):
    """Publish weights and return what safetensors reads, and the manifest."""

    def published(weights, bucket_bytes=KIB):
        with PolicyPublisher(space, bucket_bytes=bucket_bytes) as publisher:
            version = PolicyVersion(-1 if publisher.latest() is None else publisher.latest())
            manifest = publisher.publish(PolicyVersion(version + 1), 0, weights)
        return stock_read(space, manifest), manifest

    return published


def stock_read(space, manifest):
    found = {}
    for index, bucket in enumerate(manifest.buckets):
        path = space.root / space.name("dcs", manifest.version, f"b{index}")
        assert path.stat().st_size == bucket.nbytes
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found


def same_bits(found, tensor):
    raw = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (found, tensor)]
    return found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(*raw)


def every_kind():
    """Return a tensor of each element type, with sizes that leave the next one unaligned."""
    torch.manual_seed(0)
    kinds = {str(dtype): getattr(torch, dtype) for dtype in Dtype}
    return {f"{i}.{kind}": torch.randn(3, 5).abs().to(dtype) for i, (kind, dtype) in enumerate(kinds.items())}


@pytest.mark.parametrize("bucket_bytes", [1, KIB, 1 << 20])
def test_every_element_type_is_read_by_the_reference_reader(read_back, bucket_bytes):
    weights = every_kind()

    found, _ = read_back(weights.items(), bucket_bytes)

    assert set(found) == set(weights)
    assert all(same_bits(found[name], tensor) for name, tensor in weights.items())


def test_odd_shapes_are_read_by_the_reference_reader(read_back):
    matrix = torch.arange(35.0).reshape(5, 7)
    weights = {
        "scalar": torch.tensor(3.5),
        "one": torch.ones(1, 1, 1, 1, 1),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "empty too": torch.empty(4, 0),
        "row": matrix[2],
        "transposed": matrix.T,
        "every other": matrix[::2, 1::3],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "prime": torch.arange(13, dtype=torch.int8),
        "ünïcode/…": torch.tensor([True]),
        "": torch.tensor([1]),
    }

    found, manifest = read_back(weights.items())

    assert len(manifest.buckets) == 2
    assert all(same_bits(found[name], tensor) for name, tensor in weights.items())


def test_only_empty_tensors_make_a_bucket_of_its_head_alone(read_back):
    found, manifest = read_back([("a", np.empty((0, 3))), ("b", np.empty(0, np.uint8))])

    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"a": (0, 3), "b": (0,)}
    assert [bucket.nbytes % ALIGN_BYTES for bucket in manifest.buckets] == [0]


def test_tied_weights_are_two_tensors_where_both_names_are_given(read_back):
    """The format has no overlaps; the trainers give a tied tensor once, as Hugging Face saves it."""
    tied = torch.nn.Parameter(torch.randn(4, 4))

    found, manifest = read_back([("embed_tokens.weight", tied), ("lm_head.weight", tied)])

    assert same_bits(found["embed_tokens.weight"], tied)
    assert same_bits(found["lm_head.weight"], tied)
    assert sum(tensor.nbytes for tensor in manifest.tensors) == 2 * 64


def test_a_tensor_larger_than_a_bucket_has_one_to_itself(read_back):
    weights = {"before": torch.ones(4), "large": torch.arange(5000.0), "after": torch.ones(4)}

    found, manifest = read_back(weights.items())

    assert [tensor.bucket for tensor in manifest.tensors] == [0, 1, 2]
    assert all(same_bits(found[name], tensor) for name, tensor in weights.items())


def test_thousands_of_experts_fit_into_buckets_of_a_kilobyte(read_back):
    weights = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": np.full((2, 3), expert, np.uint16)
        for layer in range(4)
        for expert in range(256)
        for part in ("gate", "up", "down")
    }

    found, manifest = read_back(weights.items())

    assert len(found) == 3072
    assert all((found[name].numpy() == array).all() for name, array in weights.items())
    assert max(bucket.nbytes for bucket in manifest.buckets) <= KIB


def test_the_manifest_keeps_the_order_given_and_the_file_sorts_by_element_size(read_back):
    weights = {"a": np.zeros(3, "u1"), "b": np.zeros(3, "f8"), "c": np.zeros(3, "f2"), "d": np.zeros(3, "f4")}

    _, manifest = read_back(weights.items(), 1 << 20)

    assert [tensor.name for tensor in manifest.tensors] == ["a", "b", "c", "d"]
    by_place = sorted(manifest.tensors, key=lambda tensor: tensor.offset)
    assert [tensor.name for tensor in by_place] == ["b", "d", "c", "a"]


def test_the_same_weights_lie_the_same_in_every_version(read_back):
    _, first = read_back(every_kind().items())
    _, second = read_back(every_kind().items())

    assert (first.tensors, first.buckets) == (second.tensors, second.buckets)


def test_the_name_of_the_metadata_is_refused(read_back):
    with pytest.raises(ValueError, match="`__metadata__` cannot be published: the name is taken"):
        read_back([("__metadata__", np.zeros(1))])


def test_an_open_version_shows_its_files(read_back, space):
    _, manifest = read_back(every_kind().items())

    with PolicyReceiver(space).open() as snapshot:
        names = [segment.name for segment in snapshot.buckets()]
        assert list(snapshot.damages()) == []

    assert names == [space.name("dcs", manifest.version, f"b{i}") for i in range(len(manifest.buckets))]


@pytest.mark.parametrize("dtype", Dtype)
def test_an_element_is_as_large_as_torch_says(dtype):
    assert dtype.itemsize == getattr(torch, dtype).itemsize


described = st.builds(
    Described,
    name=st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda name: name != RESERVED),
    dtype=st.sampled_from(Dtype),
    shape=st.lists(st.integers(0, 70), max_size=3).map(tuple),
)


@given(st.lists(described, max_size=12, unique_by=lambda tensor: tensor.name))
def test_a_head_is_a_table_without_gaps_and_never_longer_than_foretold(tensors):
    head, offsets = head_and_offsets(tensors)

    table = json.loads(head[8:])
    data_bytes = sum(tensor.nbytes for tensor in tensors)
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert len(head) % ALIGN_BYTES == 0
    bound = head_bound_bytes(sum(entry_bound_bytes(tensor, data_bytes) for tensor in tensors))
    assert len(head) <= bound
    end = 0
    for start, stop in sorted(e["data_offsets"] for name, e in table.items() if name != "__metadata__"):
        assert start == end
        end = stop
    assert end == data_bytes
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert offset == len(head) + table[tensor.name]["data_offsets"][0]
        assert offset % tensor.dtype.itemsize == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(Dtype), st.lists(st.integers(0, 6), max_size=3)), max_size=12),
    st.integers(1, 2000),
)
def test_any_model_is_read_bit_for_bit_by_the_reference_reader(space, kinds, bucket_bytes):
    generator = torch.Generator().manual_seed(len(kinds))
    weights = {}
    for i, (dtype, shape) in enumerate(kinds):
        values = torch.randint(0, 2, (math.prod(shape),), generator=generator).to(getattr(torch, dtype))
        weights[f"w{i}"] = values.reshape(shape)
    with PolicyPublisher(space, bucket_bytes=bucket_bytes) as publisher:
        latest = publisher.latest()
        manifest = publisher.publish(PolicyVersion(0 if latest is None else latest + 1), 0, weights.items())

    found = stock_read(space, manifest)

    assert all(same_bits(found[name], tensor) for name, tensor in weights.items())
    with PolicyReceiver(space).open() as snapshot:
        assert all(same_bits(value, weights[name]) for name, value in snapshot.tensors())
    for index, bucket in enumerate(manifest.buckets):
        assert bucket.nbytes <= bucket_bytes or sum(t.bucket == index for t in manifest.tensors) == 1
