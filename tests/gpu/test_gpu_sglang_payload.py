"""Buckets on a GPU, opened by another process by the UUID of the GPU, as SGLang's ranks do."""

import base64
import multiprocessing
import pickle
from typing import Any

import pytest


def _rank(pipe: Any) -> None:
    """Open each payload as SGLang does, tell the sums of its weights, let go of it."""
    import torch
    from torch.multiprocessing import reductions

    rebuild = reductions.rebuild_cuda_tensor

    def by_uuid(*arguments: Any) -> Any:
        uuids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
        return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])

    reductions.rebuild_cuda_tensor = by_uuid
    while (payload := pipe.recv()) is not None:
        content = pickle.loads(base64.b64decode(payload))  # noqa: S301 - the test's own
        flat = content["flattened_tensor"]
        pipe.send(
            {
                meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).double().sum().item()
                for meta in content["metadata"]
            }
        )
        del content, flat


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
def test_a_rank_opens_what_it_is_sent_and_its_memory_comes_back():
    """For two ranks and many buckets, no more memory is held than two buckets need."""
    import torch

    from relax_actor.engines.sglang.weights.payload import buckets, collect, payloads

    bucket_bytes = 64 << 20
    spawn = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    for _ in range(2):
        pipe, far_end = spawn.Pipe()
        ranks.append(spawn.Process(target=_rank, args=(far_end,), daemon=True))
        ranks[-1].start()
        pipes.append(pipe)
    weights = [(f"w{n}", torch.full((1 << 20,), n, dtype=torch.bfloat16, device="cuda")) for n in range(256)]
    collect("cuda")
    torch.cuda.empty_cache()
    before, worst = torch.cuda.memory_reserved(), 0
    try:
        for _ in range(4):
            sums: dict[str, float] = {}
            for bucket in buckets(weights, bucket_bytes, "cuda"):
                bucket.settle()
                for pipe, payload in zip(pipes, payloads(bucket, 2), strict=True):
                    pipe.send(payload)
                first, second = (pipe.recv() for pipe in pipes)
                assert first == second
                sums |= first
                del bucket
                collect("cuda")
                worst = max(worst, torch.cuda.memory_reserved() - before)
            assert sums == {f"w{n}": n * (1 << 20) for n in range(256)}
    finally:
        for pipe in pipes:
            pipe.send(None)
        for rank in ranks:
            rank.join(30)
            rank.kill()
    assert worst <= 3 * bucket_bytes
