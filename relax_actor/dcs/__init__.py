"""Distributed checkpoint service: policy versions, staged by the trainer and installed by rollouts."""

from relax_actor.dcs.latest import PublisherActiveError
from relax_actor.dcs.manifest import BucketEntry, Dtype, Manifest, PolicyCorruptError, TensorEntry
from relax_actor.dcs.publisher import PolicyPublisher
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver, PolicySnapshot

__all__ = [
    "BucketEntry",
    "Dtype",
    "Manifest",
    "PolicyCorruptError",
    "PolicyMissingError",
    "PolicyPublisher",
    "PolicyReceiver",
    "PolicySnapshot",
    "PublisherActiveError",
    "TensorEntry",
]
