"""The route `ipc`: buckets by their handles on a GPU, by their bytes on a CPU."""

from collections.abc import Iterator

from relax_actor.engines.sglang.weights.calls import Call, Calls, load_all
from relax_actor.engines.sglang.weights.errors import RouteClosedError
from relax_actor.engines.sglang.weights.payload import Bucket, collect, payloads
from relax_actor.engines.sglang.weights.records import Deadlines, Loaded
from relax_actor.engines.sglang.weights.routes import UpdateRoute, WeightPlacement

_PATH = "/update_weights_from_tensor"


class IpcWay:
    """Sends what every rank opens itself.

    Args:
        placement: of both sides.
        deadlines: of the calls.
    """

    route = UpdateRoute.IPC

    def __init__(self, placement: WeightPlacement, deadlines: Deadlines) -> None:
        self._placement, self._deadlines = placement, deadlines
        self._first: list[str] = []

    def prepare(self, calls: Calls, first: Bucket) -> None:  # noqa: ARG002 - other ways call
        """Make the first payload.

        Raises:
            RouteClosedError: the GPU's driver shares no memory.
        """
        try:
            first.settle()
            self._first = payloads(first, self._placement.ranks)
        except RuntimeError as error:
            raise RouteClosedError(self.route, str(error)) from error

    def load(self, calls: Calls, stream: Iterator[Bucket]) -> Loaded:
        """Send all buckets."""
        return load_all(calls, stream, lambda bucket: self._send(calls, bucket), self._collect)

    def close(self) -> None:
        """Nothing lasts longer than an update."""

    def _send(self, calls: Calls, bucket: Bucket) -> Call:
        bucket.settle()
        first, self._first = self._first, []
        body = {
            "serialized_named_tensors": first or payloads(bucket, self._placement.ranks),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(calls.version) if bucket.is_last else None,
        }
        return calls.start(_PATH, body, self._deadlines.of(bucket.nbytes))

    def _collect(self) -> None:
        collect(self._placement.device)
