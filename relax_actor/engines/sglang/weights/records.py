"""The words of an update: what it needs of a server, what it is told, what it reports. Pure."""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from relax_actor.engines.sglang.weights.plan import UpdateMode
from relax_actor.engines.sglang.weights.routes import UpdateRoute

BUCKET_BYTES = 1 << 30
"""A call costs 10 to 25 ms, whatever its size; two buckets lie on the GPU beside SGLang's own memory."""


class Client(Protocol):
    """HTTP to one server; every answer that is not a 200 is raised."""

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float) -> Any:
        """POST a JSON body and return the answer, decoded where it is JSON."""
        ...

    def get(self, path: str, *, deadline_s: float) -> Any:
        """GET, likewise."""
        ...

    def start(self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float) -> Future[Any]:
        """Begin a POST and return what will hold the answer, or what was raised."""
        ...


class Facts(Protocol):
    """What of a server decides how it is updated; `relax_actor.engines.sglang.capabilities` reads it."""

    @property
    def version(self) -> tuple[int, ...]:
        """SGLang's version."""
        ...

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        ...

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        ...

    @property
    def weight_sessions(self) -> bool:
        """Whether buckets go between `/begin_weight_update` and `/end_weight_update`."""
        ...

    @property
    def retract(self) -> bool:
        """Whether the cache can be flushed under a `retract` pause."""
        ...


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long the steps of an update may take."""

    step_s: float = 30.0
    """Of any step, before its bytes are counted."""
    bytes_per_s: float = 50e6
    """The slowest that weights are believed to be loaded; what is slower hangs."""
    join_s: float = 60.0
    """For all members of a group to meet."""

    def of(self, nbytes: int = 0) -> float:
        """Return the seconds for a step that moves so many bytes."""
        return self.step_s + nbytes / self.bytes_per_s


class UpdateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an updater is told once."""

    bucket_bytes: int = BUCKET_BYTES
    verify: bool = True
    """Compare the weights' digest with that of other replicas, on a GPU."""
    digests: Path | None = None
    """Folder of this launch for the digests, shared by its replicas; None compares nothing."""
    model_path: Path | None = None
    """What lies beside weights in a model folder is taken from here."""
    scratch: Path | None = None
    """Where model folders of links may be made."""
    routes: tuple[UpdateRoute, ...] = tuple(UpdateRoute)
    """Those that may be taken."""
    deadlines: Deadlines = Deadlines()


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an update did."""

    mode: UpdateMode
    route: UpdateRoute
    seconds: float
    paused_s: float  # nothing was decoded meanwhile
    nbytes: int
    buckets: int
    checksum_s: float | None = None  # None: nothing was compared


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a route has brought."""

    nbytes: int
    buckets: int
