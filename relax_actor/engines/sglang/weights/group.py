"""The route `group`: broadcasts to all ranks of a server, where none of them can open this process' memory.

The rollout is rank 0, never the trainer, so that nobody but this replica waits for its server. A group is
made once in a process' life, under a name and at a port of its own, and never again: after any failure the
server is killed, and the next incarnation makes another one.

SGLang builds its side below torch.distributed's public face, so this side does the same: with
`init_process_group` the two would wait for each other in different places until the deadline.
"""

import contextlib
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from relax_actor.engines.sglang.weights.calls import SLACK_S, Call, Calls, load_all
from relax_actor.engines.sglang.weights.errors import RouteClosedError
from relax_actor.engines.sglang.weights.payload import Bucket
from relax_actor.engines.sglang.weights.records import Deadlines, Loaded
from relax_actor.engines.sglang.weights.routes import UpdateRoute, WeightPlacement, group_backend
from transport.errors import AddressError
from transport.ports import bind_allowed, listening_socket

_INIT = "/init_weights_update_group"
_UPDATE = "/update_weights_from_distributed"
_DESTROY = "/destroy_weights_update_group"


class GroupWay:
    """Broadcasts buckets to a server's ranks.

    Args:
        placement: of both sides.
        deadlines: of meeting, and of the calls.
    """

    route = UpdateRoute.GROUP

    def __init__(self, placement: WeightPlacement, deadlines: Deadlines) -> None:
        self._placement, self._deadlines = placement, deadlines
        self._backend = group_backend(placement)
        self._name = f"relax-{uuid.uuid4().hex}"
        self._group: Any = None
        self._calls: Calls | None = None

    def prepare(self, calls: Calls, first: Bucket) -> None:  # noqa: ARG002 - other ways call
        """Meet the server's ranks, unless that was done.

        Raises:
            RouteClosedError: this side cannot open a meeting place; the server was not asked.
            SglangUpdateError: they did not all come in time: the server waits for ever.
        """
        if self._group is not None:
            return
        store = self._opened_store()
        join_s = self._deadlines.join_s
        with calls.explained("join"):
            joined = _in_thread(lambda: self._joined(store))
            invited = calls.client.start(_INIT, self._invitation(store.port), deadline_s=join_s)
            calls.settle("join", invited, join_s)
            self._group = joined.result(SLACK_S)  # the server's ranks have met, so this one has

    def load(self, calls: Calls, stream: Iterator[Bucket]) -> Loaded:
        """Broadcast all buckets, each while the server's call for it is under way."""
        self._calls = calls
        return load_all(calls, stream, lambda bucket: self._send(calls, bucket), lambda: None)

    def close(self) -> None:
        """Leave in order; a server that is gone does not mind."""
        group, self._group = self._group, None
        if group is None or self._calls is None:
            return
        with contextlib.suppress(Exception):
            left = self._calls.client.start(
                _DESTROY, {"group_name": self._name}, deadline_s=self._deadlines.step_s
            )
            dist.destroy_process_group(group)
            left.result(self._deadlines.step_s)

    def _opened_store(self) -> Any:
        address = self._placement.address
        try:
            listener = bind_allowed(lambda port: listening_socket(address, port))
            return dist.TCPStore(  # type: ignore[attr-defined]  # torch says less than it has
                address,
                listener.getsockname()[1],
                1 + self._placement.ranks,
                is_master=True,
                timeout=timedelta(seconds=self._deadlines.join_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError, AddressError) as error:
            raise RouteClosedError(self.route, str(error)) from error

    def _invitation(self, port: int) -> dict[str, Any]:
        return {
            "master_address": self._placement.address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._placement.ranks,
            "group_name": self._name,
            "backend": self._backend.value,
        }

    def _joined(self, store: Any) -> Any:
        size = 1 + self._placement.ranks
        if self._placement.device != "cpu":
            torch.cuda.set_device(self._placement.device)
        group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - as SGLang does; see above
            size,
            0,
            [],
            c10d.Backend(self._backend.value),
            c10d.PrefixStore(self._name, store),
            group_name=self._name,  # type: ignore[arg-type]  # a NewType of some versions of torch
            backend_options=None,
            timeout=timedelta(seconds=self._deadlines.join_s),
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # noqa: SLF001 - as above
        return group

    def _send(self, calls: Calls, bucket: Bucket) -> Call:
        body = {
            "names": [weight.name for weight in bucket.weights],
            "dtypes": [str(weight.dtype).removeprefix("torch.") for weight in bucket.weights],
            "shapes": [list(weight.shape) for weight in bucket.weights],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(calls.version) if bucket.is_last else None,
        }
        deadline_s = self._deadlines.of(bucket.nbytes)
        call = calls.start(_UPDATE, body, deadline_s)
        work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        return _Broadcast(call, work, bucket)


class _Broadcast(Call):
    """A bucket that is broadcast; it and its memory stay until the server has it."""

    def __init__(self, call: Call, work: Any, bucket: Bucket) -> None:
        self._call, self._work, self._bucket = call, work, bucket

    def settle(self) -> None:
        """Wait for the server, which has waited for the broadcast."""
        self._call.settle()
        self._work.wait()


def _in_thread(join: Any) -> Future[Any]:
    """Run what may wait for a peer that never comes, in a thread that nobody waits for at the end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(join())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    Thread(target=run, daemon=True, name="sglang-group").start()
    return future
