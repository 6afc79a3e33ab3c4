"""What a replica and its host's store say to one another before bytes flow through a ring."""

import msgspec

from relax_actor.dcs.manifest import OWNER, Manifest
from relax_actor.dcs.routes import Route
from relax_actor.ids import PolicyVersion
from transport.shm import SegmentBusyError, SegmentError, ShmSpace

STAGE_OWNER = f"{OWNER}-stage"
"""Owner of the pages of transfers; the segment's incarnation is the store's."""

ALIVE_LABEL = "alive"
"""Label of the segment whose lock says that a store lives."""


class StageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Replica to store: bring a version to my GPU."""

    version: PolicyVersion
    route: Route  # `cuda_ipc` or `pinned`
    device: str  # UUID of the replica's GPU


class StageOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Store to replica: these slots are being filled."""

    page: str  # name of the segment with the words of this transfer
    alive: str  # name of the segment that the store holds a lock on
    handles: tuple[bytes, ...]  # of the slots
    slot_bytes: int
    manifest: Manifest


class StageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Store to replica: an offer, or why there is none."""

    offer: StageOffer | None = None
    refused: str = ""
    is_missing: bool = False  # the version is not there; otherwise this way is closed


def is_alive(space: ShmSpace, name: str) -> bool:
    """Whether somebody holds the lock of a segment; a stopped process does, a dead one does not."""
    try:
        space.attach(name, lease=True).close()
    except SegmentBusyError:
        return True
    except SegmentError:
        return False
    return False
