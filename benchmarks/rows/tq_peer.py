"""The TransferQueue package: one storage unit, one ZeroMQ thread, the setting in which it is fastest here."""

import os
import time
from importlib.metadata import version
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR", "TQ_NUM_THREADS": "1"}

import ray  # type: ignore[import-not-found] # in its own environment
import torch
import transfer_queue  # type: ignore[import-not-found] # in its own environment
from omegaconf import OmegaConf  # type: ignore[import-not-found] # in its own environment
from tensordict import TensorDict  # type: ignore[import-not-found] # in its own environment
from transfer_queue.client import TransferQueueClient  # type: ignore[import-not-found] # see above

from rows.engine import Consumer, Engine, Producer
from rows.work import FIELDS, GET_ROWS, READ, Plan, Row

_POLL_S = 0.0005
_PARTITION_ROWS = 256


def _client(settings: Any, name: str) -> Any:
    torch.set_num_threads(1)
    client = TransferQueueClient(name, settings.controller.zmq_info)
    backend = settings.backend.storage_backend
    client.initialize_storage_manager(backend, settings.backend[backend])
    return client


class _Producer(Producer):
    def __init__(self, settings: Any, index: int) -> None:
        self._client = _client(settings, f"producer{index}")

    def put(self, rows: list[Row], first: int) -> None:
        names = (*FIELDS, *(["image"] if "image" in rows[0] else []))
        columns = {
            name: torch.nested.as_nested_tensor(
                [torch.from_numpy(row[name]) for row in rows], layout=torch.jagged
            )
            for name in names
        }
        columns["reward"] = torch.tensor([[float(row["reward"])] for row in rows])
        data = TensorDict(columns, batch_size=len(rows))
        self._client.put(data, partition_id=f"train_{first // _PARTITION_ROWS}")

    def close(self) -> None:
        self._client.close()


class _Consumer(Consumer):
    def __init__(self, settings: Any, plan: Plan) -> None:
        self._client = _client(settings, "consumer")
        self._fields = [*READ, "reward", *(["image"] if plan.media else [])]
        self._partition, self._taken = 0, 0

    def get(self) -> tuple[Row, float | None]:
        while True:
            since = time.perf_counter()
            found = self._client.get_meta(
                data_fields=self._fields,
                batch_size=GET_ROWS,
                partition_id=f"train_{self._partition}",
                task_name="train",
            )
            if found.size:
                break
            time.sleep(_POLL_S)
        data = self._client.get_data(found)
        # A jagged tensor is packed, in memory of this process.
        packed = {name: data[name].values().numpy() for name in self._fields if name != "reward"}
        packed["ends"] = data["tokens"].offsets().numpy()[1:]
        return packed, time.perf_counter() - since

    def after(self) -> None:
        self._taken += GET_ROWS
        if self._taken == _PARTITION_ROWS:
            self._client.clear_partition(f"train_{self._partition}")
            self._partition, self._taken = self._partition + 1, 0

    def close(self) -> None:
        self._client.close()


class TransferQueuePackage(Engine):
    """Its controller and storage are Ray actors; producers and consumer are plain processes, as with us."""

    version = version("transferqueue")

    def start(self, plan: Plan) -> Any:  # noqa: ARG002 - the interface
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            logging_level="error",
        )
        settings = {
            "controller": {"polling_mode": True},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {"num_data_storage_units": 1},
            },
        }
        return transfer_queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))

    def stop(self) -> None:
        transfer_queue.close()
        ray.shutdown()

    def producer(self, shared: Any, plan: Plan, index: int) -> Producer:  # noqa: ARG002 - the interface
        return _Producer(shared, index)

    def consumer(self, shared: Any, plan: Plan) -> Consumer:
        return _Consumer(shared, plan)


def engine() -> Engine:
    """Return the engine."""
    return TransferQueuePackage()
