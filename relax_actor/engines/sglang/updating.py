"""How new weights get into a server: by whom, in which mode, and which requests are cut off meanwhile."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

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


class Update:
    """One replacing of a server's weights, and what becomes of the requests meanwhile.

    Args:
        generation: has the requests.
        mode: whether they stay in the server, or are cut off and sent again.
    """

    def __init__(self, generation: Generation, mode: UpdateMode) -> None:
        self._generation, self._mode = generation, mode
        self._since: float | None = None
        self._aborted = 0
        self._report: UpdateReport

    def replace(
        self, updater: WeightUpdater, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]"
    ) -> None:
        """Bring the weights in, cutting requests off right before, if this is such an update."""
        self._report = updater.update(version, weights, mode=self._mode, on_pause=self._collect)

    def resume(self, version: PolicyVersion) -> dict[str, Any]:
        """Have the requests go on; return what the update took, as the fields of its event."""
        report = self._report
        replayed, read = self._generation.resume(version), self._generation.prompts_read()
        return {
            "mode": report.mode,
            "route": report.route,
            "seconds": report.seconds,
            "stopped_s": round(self._stopped_s or report.paused_s, 4),
            "nbytes": report.nbytes,
            "buckets": report.buckets,
            "checksum_s": report.checksum_s,
            "in_flight": len(self._generation.keys),
            "aborted": self._aborted,
            "replayed_tokens": replayed,
            "prompt_tokens": read.tokens,
            "cached_tokens": read.cached,
        }

    def _collect(self) -> None:
        if self._mode is UpdateMode.ABORT:
            self._since = time.monotonic()
            self._aborted = self._generation.collect()

    @property
    def _stopped_s(self) -> float:
        """How long nothing has been sampled."""
        return 0.0 if self._since is None else time.monotonic() - self._since


def known(weights: "Iterable[tuple[str, Tensor]]", names: frozenset[str]) -> "Iterator[tuple[str, Tensor]]":
    """Pass weights on, as far as the model has them.

    Args:
        weights: by name.
        names: of all weights of the model; empty: not known, and none is refused.

    Raises:
        KeyError: it does not have one.
    """
    for name, tensor in weights:
        if names and name not in names:
            raise KeyError(f"the model has no weight `{name}`")
        yield name, tensor


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
