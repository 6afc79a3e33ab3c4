"""Weights are in place only when they were read back: an install with a probe behind it.

A few tensors of each version, other ones each time, are remembered as the source handed them out and compared
with what the engine shows afterwards, after the same conversion of the element type. An engine that cannot
show its weights compares digests by itself.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import xxhash

from relax_actor.dcs.manifest import Manifest
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

PROBED_TENSORS = 4
PROBED_BYTES = 32 << 20


class InstallTarget(Protocol):
    """What of an engine an install needs; see `relax_actor.engines.base.Engine`."""

    @property
    def can_read_back(self) -> bool:
        """Whether it can show installed weights."""
        ...

    def install(self, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy weights."""
        ...

    def weights(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
        """Show installed weights."""
        ...

    def invalidate(self) -> None:
        """Take the weights for torn."""
        ...


class ProbeError(RelaxError):
    """An installed weight is not what was published, although its bucket was.

    Args:
        version: the policy version.
        name: of the tensor.
        expected: its XXH3-64 as published, in the engine's element type.
        found: that of what the engine has.
    """

    def __init__(self, version: PolicyVersion, name: str, expected: str, found: str) -> None:
        self.version, self.name, self.expected, self.found = version, name, expected, found
        super().__init__(
            f"`{name}` of policy version {version} was installed wrong: expected {expected}, found {found}"
        )


def probe_names(manifest: Manifest) -> frozenset[str]:
    """Choose the tensors to read back, by the version: few, not too large, over the time all that are not.

    Pure. Where every tensor is larger than what may be read back, the smallest is chosen.
    """
    seed = manifest.version
    tensors = [entry for entry in manifest.tensors if entry.nbytes]
    order = sorted(tensors, key=lambda entry: xxhash.xxh3_64_intdigest(entry.name.encode(), seed=seed))
    chosen: dict[str, int] = {}
    for entry in order:
        if len(chosen) < PROBED_TENSORS and sum(chosen.values()) + entry.nbytes <= PROBED_BYTES:
            chosen[entry.name] = entry.nbytes
    if tensors and not chosen:
        return frozenset({min(tensors, key=lambda entry: entry.nbytes).name})
    return frozenset(chosen)


def install_probed(
    target: InstallTarget, manifest: Manifest, tensors: "Iterator[tuple[str, Tensor]]"
) -> None:
    """Install a version and read parts of it back, from an engine that can show them.

    Raises:
        ProbeError: what was read back differs; the weights are torn.
        Exception: whatever the source or the engine raises; the weights are torn.
    """
    names = probe_names(manifest) if target.can_read_back else frozenset()
    published: dict[str, Tensor] = {}
    target.install(manifest.version, _remembering(tensors, names, published))
    point("install_copied")
    if not published:
        return
    for name, installed in target.weights(sorted(published)):
        expected, found = digest(published[name].to(installed.dtype)), digest(installed)
        if expected != found:
            target.invalidate()
            raise ProbeError(manifest.version, name, expected, found)


def digest(tensor: "Tensor") -> str:
    """Return the XXH3-64 of a tensor's bytes in C order, as 16 hex digits."""
    import torch  # noqa: PLC0415 - whoever has a tensor has imported it

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.cpu().numpy().data)


def _remembering(
    tensors: "Iterator[tuple[str, Tensor]]", names: frozenset[str], published: "dict[str, Tensor]"
) -> "Iterator[tuple[str, Tensor]]":
    for name, tensor in tensors:
        if name in names:
            published[name] = tensor.detach().clone()  # the source may use the memory again
        yield name, tensor
