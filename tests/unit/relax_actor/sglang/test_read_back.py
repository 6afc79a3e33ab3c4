"""An engine that cannot show its weights is not probed, and lends nothing."""

from collections.abc import Iterable

import torch

from relax_actor.dcs.layout import fill_buckets
from relax_actor.dcs.loans import Lender
from relax_actor.dcs.manifest import BucketEntry, Manifest, TensorEntry
from relax_actor.dcs.probe import install_probed
from relax_actor.ids import PolicyVersion

WEIGHTS = {"a": torch.ones(4), "b": torch.zeros(2, 2)}


class Blind:
    """Installs, and shows nothing."""

    can_read_back = False

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.names: list[str] = []

    def install(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.names, self.version = [name for name, _ in weights], version

    def weights(self, names: Iterable[str]):
        raise AssertionError(f"asked for {list(names)}")

    def invalidate(self) -> None:
        raise AssertionError("torn")


def _manifest() -> Manifest:
    (bucket,) = fill_buckets(WEIGHTS.items(), 1 << 20)
    tensors = tuple(
        TensorEntry(name=p.name, dtype=p.dtype, shape=p.shape, bucket=0, offset=p.offset, nbytes=p.nbytes)
        for p in bucket.tensors
    )
    buckets = (BucketEntry(nbytes=bucket.nbytes, xxh3="0" * 16),)
    return Manifest(version=PolicyVersion(3), step=1, tensors=tensors, buckets=buckets)


def test_it_is_not_probed():
    engine = Blind()

    install_probed(engine, _manifest(), iter(WEIGHTS.items()))

    assert (engine.version, engine.names) == (3, ["a", "b"])


def test_it_lends_nothing():
    engine = Blind()
    lender = Lender(engine)
    engine.install(PolicyVersion(3), WEIGHTS.items())
    lender.installed(_manifest())

    assert lender.offer is None
    assert lender.lend(PolicyVersion(3)) is None
