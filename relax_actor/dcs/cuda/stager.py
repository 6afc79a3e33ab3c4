"""The store's side of the GPU routes: it fills a ring of slots on a replica's GPU.

The store sees all GPUs of its host; a replica sees its own. So the store allocates the slots there, lets the
replica open them, and copies into them out of page-locked buckets, or over NVLink out of the trainer's
snapshot. The trainer takes no part in either, and page-locked memory, which makes a process die slowly, is in
the store only. Each transfer has a thread; a replica that dies or stands still costs that thread its patience
and the store nothing.

Invariant: a ring is lent again only after the page of the transfer before says that it has failed, or the
reader has said that it is done. A reader looks at the page after each copy out of a slot, so one that stood
still meanwhile never takes another transfer's bytes for its own.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable

from relax_actor.dcs.cuda.device import Gpus
from relax_actor.dcs.cuda.pinned import PinnedPool
from relax_actor.dcs.cuda.ring import PAGE_BYTES, Page
from relax_actor.dcs.cuda.slots import SlotStock
from relax_actor.dcs.cuda.snapshot import SnapshotReader
from relax_actor.dcs.cuda.staging import (
    ALIVE_LABEL,
    STAGE_OWNER,
    StageOffer,
    StageReply,
    StageRequest,
)
from relax_actor.dcs.cuda.transfer import (
    HostSource,
    SnapshotSource,
    Source,
    StageClosedError,
    Staged,
    Transfer,
)
from relax_actor.dcs.manifest import OWNER, bucket_label
from relax_actor.dcs.receiver import PolicyMissingError, PolicyReceiver
from relax_actor.dcs.routes import Route
from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion
from transport.shm import SegmentError, ShmSpace

SLOT_BYTES = 512 << 20
"""As much as a bucket has, so that most buckets go through in one piece."""

STALL_S = 10.0
"""A reader that is done with nothing for so long is given up."""


class Stager:
    """Brings versions to the GPUs of this host.

    Args:
        space: the run's shared memory.
        gpus: all GPUs of the host.
        incarnation: of the store; what an earlier one has left is removed.
        slot_bytes: the size of a slot, at most; larger buckets go through in pieces.
        slots: how many slots a ring has.
        stall_s: how long a reader may stand still.
        on_staged: told, in a thread of its own, of each transfer that has ended.
    """

    def __init__(
        self,
        space: ShmSpace,
        gpus: Gpus,
        *,
        incarnation: int = 1,
        slot_bytes: int = SLOT_BYTES,
        slots: int = 2,
        stall_s: float = STALL_S,
        on_staged: Callable[[Staged], None] = lambda _: None,
    ) -> None:
        self._space, self._incarnation, self._stall_s = space, incarnation, stall_s
        self._gpus, self._on_staged = gpus, on_staged
        space.sweep(STAGE_OWNER)
        self._alive_name = _made(space, incarnation, ALIVE_LABEL, 1)
        self._alive = space.try_lock(self._alive_name)
        self._stock = SlotStock(gpus, slot_bytes=slot_bytes, slots=slots)
        self._pinned = PinnedPool(space, gpus)
        self._snapshots = SnapshotReader(space, gpus)
        self._receiver = PolicyReceiver(space)
        self._verified: set[tuple[PolicyVersion, int]] = set()
        self._numbers = itertools.count()
        self._transfers: list[Transfer] = []
        self._warmed: PolicyVersion | None = None
        self._warming: threading.Thread | None = None

    def open(self, request: StageRequest) -> StageReply:
        """Start a transfer; the reader finds its progress in the page of the offer. Quick, never raises."""
        try:
            return StageReply(offer=self._opened(request))
        except PolicyMissingError as error:
            return StageReply(refused=str(error), is_missing=True)
        except (RelaxError, SegmentError, RuntimeError) as error:  # torch's errors of a GPU are the last kind
            return StageReply(refused=f"{request.route} to {request.device}: {error}")

    def tick(self) -> None:
        """Page-lock what was published, unlock what is gone; to be called every now and then. Quick."""
        self._transfers = [transfer for transfer in self._transfers if transfer.is_alive()]
        latest = self._receiver.latest()
        if self._warming is not None and self._warming.is_alive():
            return
        if latest is not None and latest != self._warmed:
            self._warmed = latest
            self._warming = threading.Thread(target=self._warm, args=(latest,), name="dcs-pin", daemon=True)
            self._warming.start()
        elif not self._transfers:
            self._pinned.trim(OWNER)
            self._snapshots.forget_dead()
            self._verified = {key for key in self._verified if latest is None or key[0] >= latest}

    @property
    def transfers(self) -> int:
        """How many transfers are under way."""
        return sum(transfer.is_alive() for transfer in self._transfers)

    def close(self) -> None:
        """End all transfers and give all memory back."""
        for transfer in self._transfers:
            transfer.stop()
        if self._warming is not None:
            self._warming.join()
        self._stock.close()
        self._pinned.close()
        self._snapshots.close()
        if self._alive is not None:
            self._alive.close()
        self._space.sweep(STAGE_OWNER, self._incarnation)

    # -- inside ---------------------------------------------------------------------------------

    def _opened(self, request: StageRequest) -> StageOffer:
        with contextlib.ExitStack() as stack:
            find = self._snapshot if request.route is Route.CUDA_IPC else self._host
            source: Source = find(request.version)
            stack.callback(source.close)
            sizes = [bucket.nbytes for bucket in source.manifest.buckets]
            slots = self._stock.take(request.device, max(sizes, default=1))
            stack.callback(self._stock.put_back, slots)
            name = _made(self._space, self._incarnation, f"t{next(self._numbers)}", PAGE_BYTES)
            stack.callback(self._space.unlink, name)
            page = Page(self._space.attach(name, writable=True))
            transfer = Transfer(
                self._gpus,
                request,
                source,
                slots,
                page,
                is_read=lambda: self._is_read(name),
                stall_s=self._stall_s,
            )
            transfer.start(stack.pop_all().close, self._on_staged)
        self._transfers.append(transfer)
        return StageOffer(
            page=name,
            alive=self._alive_name,
            handles=slots.handles,
            slot_bytes=slots.slot_bytes,
            manifest=source.manifest,
        )

    def _is_read(self, page: str) -> bool:
        """Whether somebody holds a lease on the page."""
        try:
            lock = self._space.try_lock(page)
        except SegmentError:
            return False
        if lock is None:
            return True
        lock.close()
        return False

    def _host(self, version: PolicyVersion) -> "HostSource":
        snapshot = self._receiver.open(version)
        try:
            names = [
                self._space.name(OWNER, version, bucket_label(index))
                for index in range(len(snapshot.manifest.buckets))
            ]
            return HostSource(snapshot, [self._pinned.get(name) for name in names], self._verified)
        except BaseException:
            snapshot.close()
            raise

    def _snapshot(self, version: PolicyVersion) -> "SnapshotSource":
        manifest = self._receiver.manifest(version)
        if not all(bucket.fold for bucket in manifest.buckets):
            raise StageClosedError(f"version {version} was published without folds")
        lease = self._snapshots.lease(version)
        if lease is None:
            raise StageClosedError(f"no GPU offers version {version}")
        return SnapshotSource(manifest, lease, self._snapshots)

    def _warm(self, version: PolicyVersion) -> None:
        with contextlib.suppress(RelaxError, SegmentError), self._receiver.open(version) as snapshot:
            for index in range(len(snapshot.manifest.buckets)):
                self._pinned.get(self._space.name(OWNER, version, bucket_label(index))).data()


def _made(space: ShmSpace, incarnation: int, label: str, nbytes: int) -> str:
    with space.create(STAGE_OWNER, incarnation, label, nbytes) as segment:
        return segment.name
