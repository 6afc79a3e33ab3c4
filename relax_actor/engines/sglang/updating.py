"""How new weights get into a server: by whom, in which mode, and which requests are cut off meanwhile."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from relax_actor.engines.sglang.capabilities import Capabilities
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.errors import EngineDownError
from relax_actor.engines.sglang.generation import Generation
from relax_actor.engines.sglang.weights import UpdateMode, UpdateReport
from relax_actor.ids import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class WeightUpdater(Protocol):
    """Brings weights into a server; see `relax_actor.engines.sglang.weights.Updater`."""

    @property
    def is_torn(self) -> bool:
        """Whether an update that failed had touched the server."""
        ...

    def update(
        self,
        version: PolicyVersion,
        tensors: "Iterable[tuple[str, Tensor]]",
        *,
        mode: UpdateMode,
        on_pause: Callable[[], None] | None = None,
    ) -> UpdateReport:
        """Replace all weights; `on_pause` is called right before the server is touched."""
        ...

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        ...


MakeUpdater = Callable[[Client, Capabilities], WeightUpdater]


class Collected:
    """The requests that an update has cut off; none, where they stay in the server."""

    def __init__(self, generation: Generation, mode: UpdateMode) -> None:
        self._generation, self._mode = generation, mode
        self._since: float | None = None
        self.samples = 0

    def collect(self) -> None:
        """Cut them off, if this is such an update."""
        if self._mode is UpdateMode.ABORT:
            self._since = time.monotonic()
            self.samples = self._generation.collect()

    @property
    def stopped_s(self) -> float:
        """How long nothing has been sampled."""
        return 0.0 if self._since is None else time.monotonic() - self._since


def update_mode_of(setting: str, found: Capabilities) -> UpdateMode:
    """Return how weights are replaced: in place where the server says which weights sampled which token.

    Args:
        setting: `auto`, `in_place`, `retract` or `abort`.
        found: what the server can do.

    Raises:
        EngineDownError: `in_place` of a server that does not say it, or `retract` of one that would keep
            stale keys and values.
    """
    if setting == "auto":
        return UpdateMode.IN_PLACE if found.version_spans else UpdateMode.ABORT
    version = ".".join(map(str, found.version))
    if setting == "in_place" and not found.version_spans:
        raise EngineDownError(f"SGLang {version} does not say which weights sampled a token; 0.5.19 does")
    if setting == "retract" and not found.retract:
        raise EngineDownError(f"SGLang {version} cannot flush its cache while it is paused; 0.5.21 can")
    return UpdateMode(setting)
