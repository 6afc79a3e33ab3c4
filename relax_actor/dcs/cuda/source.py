"""The replica's side of the GPU routes: it asks the store to fill a ring on its GPU, and copies out of it.

Each bucket is checked on the GPU before the first of its tensors is handed out, and each slot is given back
only when everything queued so far has been done with it. The replica page-locks nothing and sees no GPU but
its own.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from relax_actor.dcs.cuda.device import Gpus
from relax_actor.dcs.cuda.fold import digest, fold
from relax_actor.dcs.cuda.ring import Chunk, Page, chunks
from relax_actor.dcs.cuda.slots import OpenedSlots
from relax_actor.dcs.cuda.staging import StageOffer, StageReply, StageRequest, is_alive
from relax_actor.dcs.manifest import Manifest, PolicyCorruptError, TensorEntry
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver
from relax_actor.dcs.routes import Route
from relax_actor.dcs.source import SourceUnavailableError
from relax_actor.errors import RelaxError
from relax_actor.faults import point
from relax_actor.ids import PolicyVersion
from transport.shm import SegmentError, ShmSpace

Ask = Callable[[StageRequest], StageReply]
"""Calls `Stager.open` in the store; raises a `RelaxError` where there is no store."""

STALL_S = 10.0
"""A store that fills nothing for so long is given up."""

_LOOK_S = 0.02  # how often to look whether the store is alive
_NAP_S = 20e-6


class StagedSource:
    """A GPU route: `Route.CUDA_IPC` or `Route.PINNED`; see `relax_actor.dcs.source.PolicySource`.

    Args:
        route: which of the two.
        space: the run's shared memory.
        gpus: those this process sees.
        device: UUID of the GPU with the replica's weights.
        ask: how to reach the host's store.
        stall_s: how long the store may stand still.
    """

    def __init__(
        self,
        route: Route,
        space: ShmSpace,
        gpus: Gpus,
        device: str,
        ask: Ask,
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self.route = route
        self._space, self._gpus, self._device, self._ask = space, gpus, device, ask
        self._stall_s = stall_s
        self._receiver = PolicyReceiver(space)
        self._slots = OpenedSlots(gpus, device)

    def latest(self) -> PolicyVersion | None:
        """Return the newest version in shared memory: whatever is on a GPU is there as well."""
        return self._receiver.latest()

    def open(self, version: PolicyVersion) -> "AbstractContextManager[StagedVersion]":
        """Have a version brought to this GPU.

        Raises:
            SourceUnavailableError: there is no store, or this way is closed to it.
            PolicyMissingError: it does not have the version.
        """
        try:
            reply = self._ask(StageRequest(version=version, route=self.route, device=self._device))
        except RelaxError as error:
            raise SourceUnavailableError(self.route, f"the store does not answer: {error}") from error
        if reply.is_missing:
            raise PolicyMissingError(version, self.latest())
        if reply.offer is None:
            raise SourceUnavailableError(self.route, reply.refused)
        return contextlib.closing(self._opened(reply.offer))

    def close(self) -> None:
        """Let go of the store's memory."""
        self._slots.close()

    def _opened(self, offer: StageOffer) -> "StagedVersion":
        try:
            page = Page(self._space.attach(offer.page, writable=True, lease=True))
        except SegmentError as error:
            raise SourceUnavailableError(self.route, f"the store has ended: {error}") from error
        try:
            slots = self._slots.open(offer.handles, offer.slot_bytes)
        except (RelaxError, RuntimeError) as error:
            page.close()
            raise SourceUnavailableError(self.route, str(error)) from error
        incoming = _Incoming(
            page,
            offer.manifest.version,
            self.route,
            is_store_alive=lambda: is_alive(self._space, offer.alive),
            stall_s=self._stall_s,
        )
        return StagedVersion(offer, slots, incoming, self._gpus, self._device)


class StagedVersion:
    """A version that flows through a ring; its tensors can be read once."""

    def __init__(
        self, offer: StageOffer, slots: list[Tensor], incoming: "_Incoming", gpus: Gpus, device: str
    ) -> None:
        self._offer, self._slots, self._incoming = offer, slots, incoming
        self._gpus, self._device = gpus, device

    @property
    def manifest(self) -> Manifest:
        """What it consists of."""
        return self._offer.manifest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors on this GPU; see `relax_actor.dcs.source.OpenVersion`."""
        try:
            yield from self._tensors()
        except RuntimeError as error:  # torch's errors of a GPU
            raise SourceUnavailableError(self._incoming.route, f"{self._device}: {error}") from error

    def close(self) -> None:
        """Give the ring back. Idempotent."""
        self._incoming.close()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        entries: dict[int, list[TensorEntry]] = defaultdict(list)
        for entry in self.manifest.tensors:
            entries[entry.bucket].append(entry)
        for bucket, data in self._buckets():
            self._check(bucket, data)
            point("install_bucket")
            for entry in entries[bucket]:
                yield entry.name, _view(entry, data)

    def _buckets(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each bucket, whole: in its slot, or put together where it is larger than one."""
        sizes = [bucket.nbytes for bucket in self.manifest.buckets]
        whole: Tensor | None = None
        for number, chunk in enumerate(chunks(sizes, self._offer.slot_bytes)):
            self._incoming.wait_for(number)
            data = self._slots[number % len(self._slots)][: chunk.nbytes]
            size = sizes[chunk.bucket]
            if chunk.nbytes == size:
                yield chunk.bucket, data
            else:
                whole = self._joined(whole, chunk, data, size)
                if chunk.start + chunk.nbytes == size:
                    yield chunk.bucket, whole
                    whole = None
            self._gpus.finish_current(self._device)
            self._incoming.done_with(number)

    def _joined(self, whole: Tensor | None, chunk: Chunk, data: Tensor, size: int) -> Tensor:
        if whole is None:
            whole = torch.empty(size, dtype=torch.uint8, device=data.device)
        whole[chunk.start : chunk.start + chunk.nbytes].copy_(data)
        return whole

    def _check(self, bucket: int, data: Tensor) -> None:
        expected = self.manifest.buckets[bucket].fold
        if not expected:
            return  # the store has compared the other checksum
        found = digest(int(fold(data)))
        if found != expected:
            raise PolicyCorruptError(self.manifest.version, bucket, expected, found)


class _Incoming:
    """The reader's end of a page."""

    def __init__(
        self,
        page: Page,
        version: PolicyVersion,
        route: Route,
        *,
        is_store_alive: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self.route = route
        self._page: Page | None = page
        self._version = version
        self._is_store_alive, self._stall_s = is_store_alive, stall_s

    def wait_for(self, number: int) -> None:
        """Wait until a chunk lies ready.

        Raises:
            SourceUnavailableError: it will not.
            PolicyCorruptError: the store found its bucket damaged.
        """
        page = self._opened()
        until_s, look_s = time.monotonic() + self._stall_s, time.monotonic() + _LOOK_S
        while page.filled <= number:
            self._check_failure(page)
            now = time.monotonic()
            if now >= look_s:
                look_s = now + _LOOK_S
                if not self._is_store_alive():
                    raise SourceUnavailableError(self.route, f"the store died before chunk {number}")
            if now >= until_s:
                raise SourceUnavailableError(self.route, f"chunk {number} did not come in {self._stall_s} s")
            time.sleep(_NAP_S)

    def done_with(self, number: int) -> None:
        """Give a slot back.

        Raises:
            SourceUnavailableError: it was taken away before, so what was copied out of it is worth nothing.
        """
        page = self._opened()
        self._check_failure(page)
        page.done_with = number + 1

    def close(self) -> None:
        """Give the page back. Idempotent."""
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def _opened(self) -> Page:
        if self._page is None:
            raise SourceUnavailableError(self.route, "the version is closed")
        return self._page

    def _check_failure(self, page: Page) -> None:
        failure = page.failure()
        if failure is None:
            return
        if failure.bucket is not None:
            raise PolicyCorruptError(self._version, failure.bucket, failure.expected, failure.found)
        raise SourceUnavailableError(self.route, failure.reason)


def _view(entry: TensorEntry, data: Tensor) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype, device=data.device)
    return data[entry.offset : entry.offset + entry.nbytes].view(dtype).reshape(entry.shape)
