"""Weights packed into buckets on the GPU they lie on: where each goes is planned once.

A bucket on the GPU is byte for byte what the segment in shared memory will be, its head included, so it
leaves in one copy, and one checksum covers it. Tensors are cast to the published element type on the way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from relax_actor.dcs.layout import Bucket, fill_buckets
from relax_actor.dcs.manifest import BucketEntry, Manifest, TensorEntry
from relax_actor.ids import PolicyVersion

Named = Sequence[tuple[str, Tensor]]


class Plan:
    """Where each weight of a model goes.

    Args:
        weights: names and tensors, of which only shape and element type count.
        bucket_bytes: the largest bucket; a single larger tensor has one to itself.
        dtype: what floating-point weights are published as; None is as they are.

    Raises:
        TypeError: an element type the DCS does not carry.
        ValueError: a name that comes twice, or is taken.
    """

    def __init__(self, weights: Named, bucket_bytes: int, dtype: torch.dtype | None) -> None:
        self._described = _description(weights)
        published = [
            (name, torch.empty(value.shape, dtype=_published(value, dtype), device="meta"))
            for name, value in weights
        ]
        self.buckets: list[Bucket] = list(fill_buckets(published, bucket_bytes))
        self.bucket_bytes = [bucket.nbytes for bucket in self.buckets]
        self.heads = [
            torch.frombuffer(bytearray(bucket.head), dtype=torch.uint8).to(weights[0][1].device)
            for bucket in self.buckets
        ]
        position = {name: index for index, (name, _) in enumerate(weights)}
        self.sources = [[position[placed.name] for placed in bucket.tensors] for bucket in self.buckets]

    def fits(self, weights: Named) -> bool:
        """Whether it is a plan of these weights."""
        return self._described == _description(weights)

    def places(self, bucket: int, data: Tensor) -> "Places":
        """Prepare to pack a bucket into uint8 [n] on the GPU."""
        targets = [
            data[placed.offset : placed.offset + placed.nbytes]
            .view(getattr(torch, placed.dtype))
            .reshape(placed.shape)
            for placed in self.buckets[bucket].tensors
        ]
        head = self.heads[bucket]
        return Places(data[: head.numel()], head, targets, self.sources[bucket])

    def manifest(
        self, version: PolicyVersion, step: int, xxh3: Sequence[str], folds: Sequence[str]
    ) -> Manifest:
        """Write down a version."""
        tensors = (
            TensorEntry(
                name=placed.name,
                dtype=placed.dtype,
                shape=placed.shape,
                bucket=index,
                offset=placed.offset,
                nbytes=placed.nbytes,
            )
            for index, bucket in enumerate(self.buckets)
            for placed in bucket.tensors
        )
        buckets = (
            BucketEntry(nbytes=nbytes, xxh3=each, fold=fold)
            for nbytes, each, fold in zip(self.bucket_bytes, xxh3, folds, strict=True)
        )
        return Manifest(version=version, step=step, tensors=tuple(tensors), buckets=tuple(buckets))


class Places(NamedTuple):
    """A bucket ready to be packed."""

    head_target: Tensor
    head: Tensor
    targets: list[Tensor]
    sources: list[int]  # numbers of the weights that go there

    @torch.no_grad()
    def pack(self, weights: Named) -> None:
        """Queue the copies on the current stream."""
        self.head_target.copy_(self.head)
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for target, number in zip(self.targets, self.sources, strict=True):
            source = weights[number][1].detach()
            if target.numel():
                group = by_type.setdefault(source.dtype, ([], []))
                group[0].append(target)
                group[1].append(source)
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)


def _description(weights: Named) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, value.shape, value.dtype) for name, value in weights]


def _published(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
