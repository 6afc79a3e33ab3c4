"""Buckets and payloads: what comes out of the strict unpickler is what went in."""

import base64
import io
import pickle

import pytest
import torch
from torch.multiprocessing import reductions
from weight_server import StrictUnpickler

from relax_actor.engines.sglang.weights.payload import Handle, buckets, collect, payloads


def _weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("embed", torch.randn(16, 8, generator=generator)),
        ("norm", torch.ones(8)),
        ("half", torch.randn(4, 4, generator=generator).to(torch.bfloat16)),
        ("turned", torch.randn(8, 4, generator=generator).T),
        ("scale", torch.tensor(2.5)),
        ("ids", torch.arange(3)),
    ]


def _opened(payload: str) -> dict[str, torch.Tensor]:
    content = StrictUnpickler(io.BytesIO(base64.b64decode(payload))).load()
    flat = content["flattened_tensor"]
    assert flat.dtype == torch.uint8
    assert flat.numel() == content["metadata"][-1].end_idx  # and nothing of a larger storage with it
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in content["metadata"]
        if meta.numel == meta.end_idx - meta.start_idx
    }


@pytest.mark.parametrize("bucket_bytes", [1, 100, 640, 1 << 20])
def test_every_weight_comes_out_of_its_bucket_unchanged(bucket_bytes: int):
    filled = list(buckets(iter(_weights()), bucket_bytes, "cpu"))

    opened = {}
    for bucket in filled:
        opened |= _opened(payloads(bucket, 1)[0])
    assert list(opened) == [name for name, _ in _weights()]
    assert all(torch.equal(opened[name], tensor) for name, tensor in _weights())
    assert [bucket.is_last for bucket in filled] == [False] * (len(filled) - 1) + [True]


def test_a_bucket_has_no_gaps_and_elements_begin_where_they_may():
    """A broadcast has no gaps, and a view of a flat bucket needs its elements aligned."""
    odd = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.ones(2))]

    filled = list(buckets(odd, 1 << 10, "cpu"))

    assert [[weight.name for weight in bucket.weights] for bucket in filled] == [["a"], ["b", "c"]]
    for bucket in filled:
        assert bucket.nbytes == sum(weight.nbytes for weight in bucket.weights)
        assert all(weight.start % weight.dtype.itemsize == 0 for weight in bucket.weights)


def test_a_weight_is_copied_before_the_next_one_is_asked_for():
    """Sources use their memory again."""
    memory = torch.zeros(4)

    def source():
        for value in (1.0, 2.0, 3.0):
            memory.fill_(value)
            yield f"w{value:.0f}", memory

    (bucket,) = buckets(source(), 1 << 10, "cpu")

    opened = _opened(payloads(bucket, 1)[0])
    assert [tensor[0].item() for tensor in opened.values()] == [1.0, 2.0, 3.0]


def test_no_weights_are_no_version():
    with pytest.raises(ValueError, match="without weights"):
        list(buckets(iter(()), 1 << 10, "cpu"))


def test_each_rank_is_sent_a_payload():
    (bucket,) = buckets(_weights()[:1], 1 << 10, "cpu")

    assert len(payloads(bucket, 4)) == 4


def test_a_handle_names_its_gpu_by_uuid_where_torch_has_a_number():
    """As the server's own reductions want it; the rest is torch's."""
    arguments = tuple(range(14))

    function, changed = pickle.loads(  # noqa: S301 - our own bytes
        pickle.dumps(_Recorded(Handle(reductions.rebuild_cuda_tensor, arguments, "GPU-7")))
    ).reduced

    assert function is reductions.rebuild_cuda_tensor
    assert changed == (0, 1, 2, 3, 4, 5, "GPU-7", *range(7, 14))


class _Recorded:
    """Keeps what a handle would be rebuilt by: there is no GPU to rebuild it on."""

    def __init__(self, handle: Handle) -> None:
        self.reduced = handle.__reduce__()


def test_nothing_is_collected_on_a_cpu():
    collect("cpu")
    filled = next(buckets(_weights(), 1 << 10, "cpu"))
    filled.settle()
