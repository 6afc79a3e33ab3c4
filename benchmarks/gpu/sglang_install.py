"""Policy versions into SGLang on GPUs: seconds by bucket size, and what running requests notice of it.

    python benchmarks/gpu/sglang_install.py OUT.json [--billions 4] [--tp 1] [--python PYTHON] [--flags "..."]

A server with a random Qwen3 of the asked size and dummy weights; the weights that are installed are made on
its GPU. `--flags` are for the machine, such as "--attention-backend triton --sampling-backend pytorch". Each
row is an update; those of one bucket size are in turn with those of the others.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from common import circumstances, spread  # noqa: E402
from parts import Parts, cuda_devices  # noqa: E402
from plain_client import PlainClient  # noqa: E402
from plain_server import served  # noqa: E402
from qwen3 import SIZES, Size, config, shapes  # noqa: E402

from relax_actor.engines.sglang.capabilities import capabilities  # noqa: E402
from relax_actor.engines.sglang.weights import (  # noqa: E402
    UpdateMode,
    Updater,
    UpdateReport,
    UpdateRoute,
    UpdateSettings,
    WeightPlacement,
)
from relax_actor.ids import PolicyVersion  # noqa: E402

BUCKETS = (1 << 28, 1 << 29, 1 << 30, 1 << 31)
ROUNDS = 5
REQUESTS = 32
TOKENS = 1500
UPDATE_AFTER_S = 3.0
MODELS = {0.6: "0.6b", 1.7: "1.7b", 4.0: "4b", 8.0: "8b"}


def main() -> None:
    """Serve, measure, write."""
    args = parsed()
    size = SIZES[MODELS[args.billions]]
    result = circumstances("gpu-sglang-install") | {"gpus": cuda_devices()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(size)))
        log, flags = args.out.with_suffix(".log"), f"--max-running-requests {REQUESTS} {args.flags}"
        with served(Path(folder), log, python=args.python, tp=args.tp, flags=flags) as client:
            bench, parts = Bench(client, args, Path(folder), size), Parts(result, args.out)
            result["sglang"] = ".".join(map(str, bench.facts.version))
            for name, part in bench.parts():
                parts.run(name, lambda name=name, part=part: result.update({name: part()}))
    print(json.dumps(result))


class Bench:
    """One server and what is measured of it."""

    def __init__(self, client: PlainClient, args: argparse.Namespace, folder: Path, size: Size) -> None:
        self.client, self.folder = client, folder
        self.facts = capabilities(client.get("/server_info", deadline_s=30))
        self.placement = WeightPlacement(
            device="cuda:0", server_devices=tuple(f"cuda:{n}" for n in range(args.tp)), ranks=args.tp
        )
        self.version = 0
        self.weights = dict(random_weights(size))

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the parts by name."""
        yield "idle", self.idle
        yield "verified", self.verified
        yield "under_load", self.under_load
        if torch.cuda.device_count() > self.placement.ranks:
            yield "broadcast", self.broadcast

    def idle(self) -> list[dict[str, Any]]:
        """Updates of an idle server, bucket sizes in turn; the first of each is left out."""
        updaters = {size: self.updater(bucket_bytes=size) for size in BUCKETS}
        reports: dict[int, list[UpdateReport]] = {size: [] for size in BUCKETS}
        for _ in range(ROUNDS + 1):
            for size, updater in updaters.items():
                reports[size].append(self.install(updater, UpdateMode.ABORT))
        return [{"bucket_bytes": size, **figures(rows[1:])} for size, rows in reports.items()]

    def verified(self) -> dict[str, Any]:
        """With the digest that replicas compare."""
        updater = self.updater(verify=True, digests=self.folder / "digests", model_path=self.folder)
        reports = [self.install(updater, UpdateMode.ABORT) for _ in range(3)]
        return figures(reports) | {"checksum_s": spread([report.checksum_s or 0.0 for report in reports])}

    def broadcast(self) -> dict[str, Any]:
        """By NCCL from a GPU that is not the server's."""
        placement = WeightPlacement(
            device=f"cuda:{self.placement.ranks}",
            server_devices=self.placement.server_devices,
            ranks=self.placement.ranks,
        )
        settings = UpdateSettings(verify=False, routes=(UpdateRoute.GROUP,))
        updater = Updater(self.client, self.facts, settings, placement=placement)
        reports = [self.install(updater, UpdateMode.ABORT) for _ in range(ROUNDS)]
        updater.close()
        return {"first": figures(reports[:1]), "later": figures(reports[1:])}

    def under_load(self) -> list[dict[str, Any]]:
        """Requests of equal length with an update in the middle of them, beside some without; modes in turn.

        The seconds that an update costs are those by which all requests end later.
        """
        updater = self.updater()
        modes = [None, *(mode for mode in UpdateMode if mode is not UpdateMode.RETRACT or self.facts.retract)]
        rows: dict[UpdateMode | None, list[dict[str, Any]]] = {mode: [] for mode in modes}
        for _ in range(ROUNDS):
            for mode in modes:
                rows[mode].append(self.loaded(updater, mode))
        calm_s = statistics.median(row["seconds"] for row in rows[None])
        return [
            {
                "mode": mode or "no update",
                "tokens_s": spread([REQUESTS * TOKENS / row["seconds"] for row in each]),
                "lost_s": spread([row["seconds"] - calm_s for row in each]),
                "paused_s": spread([row["paused_s"] for row in each]),
                "aborted": each[0]["aborted"],
                "replayed_tokens": spread([row["replayed_tokens"] for row in each]),
            }
            for mode, each in rows.items()
        ]

    def loaded(self, updater: Updater, mode: UpdateMode | None) -> dict[str, Any]:
        """Send all requests, update after a while, wait for all."""
        self.install(updater, UpdateMode.ABORT)  # an empty cache, as before every other row
        load, paused_s, started = Load(self.client, self.version), 0.0, time.monotonic()
        time.sleep(UPDATE_AFTER_S)
        if mode is not None:
            on_pause = load.collect if mode is UpdateMode.ABORT else None
            paused_s = self.install(updater, mode, on_pause=on_pause).paused_s
            load.resume(self.version)
        load.finish()
        seconds = time.monotonic() - started
        return {
            "seconds": seconds,
            "paused_s": paused_s,
            "aborted": load.aborted,
            "replayed_tokens": load.replayed_tokens,
        }

    def updater(self, **fields: Any) -> Updater:
        """Make an updater by handles."""
        settings = UpdateSettings(**({"verify": False, "routes": (UpdateRoute.IPC,)} | fields))
        return Updater(self.client, self.facts, settings, placement=self.placement)

    def install(self, updater: Updater, mode: UpdateMode, **more: Any) -> UpdateReport:
        """Install the next version."""
        self.version += 1
        return updater.update(PolicyVersion(self.version), self.weights.items(), mode=mode, **more)


class Load:
    """`REQUESTS` requests of `TOKENS` tokens each.

    Args:
        client: of the server.
        version: that is installed.
    """

    def __init__(self, client: PlainClient, version: int) -> None:
        self._client = client
        self.aborted = self.replayed_tokens = 0
        self._prefixes = [[1, *range(100, 160), 200 + number] for number in range(REQUESTS)]
        self._left = [TOKENS] * REQUESTS
        self._under_way = self._started(version)

    def collect(self) -> None:
        """Take all requests back, as their owner does before an update."""
        self._client.post("/abort_request", {"abort_all": True}, deadline_s=60)
        for number, future in self._under_way.items():
            answer = future.result(60)
            self.aborted += answer["meta_info"]["finish_reason"]["type"] == "abort"
            self._prefixes[number] += answer["output_ids"]
            self._left[number] -= len(answer["output_ids"])
        self._under_way = {}

    def resume(self, version: int) -> None:
        """Send again what was collected."""
        if not self._under_way:
            self._under_way = self._started(version)
            self.replayed_tokens = sum(len(self._prefixes[number]) for number in self._under_way)

    def finish(self) -> None:
        """Wait for all."""
        for future in self._under_way.values():
            future.result(600)

    def _started(self, version: int) -> dict[int, Any]:
        return {
            number: self._client.start("/generate", self._body(number, version), deadline_s=600)
            for number in range(REQUESTS)
            if self._left[number]
        }

    def _body(self, number: int, version: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": self._left[number], "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": self._prefixes[number], "sampling_params": sampling, "return_logprob": True}
        return body | {"rid": uuid.uuid4().hex, "extra_key": str(version)}


def figures(reports: list[UpdateReport]) -> dict[str, Any]:
    """Return seconds, pauses and bytes of some updates."""
    return {
        "seconds": spread([report.seconds for report in reports]),
        "paused_s": spread([report.paused_s for report in reports]),
        "nbytes": reports[0].nbytes,
        "buckets": reports[0].buckets,
        "route": reports[0].route.value,
    }


def random_weights(size: Size) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights of a model, bfloat16 on the GPU."""
    for name, shape in shapes(size):
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        else:
            yield name, torch.randn(shape, dtype=torch.bfloat16, device="cuda") / math.sqrt(size.hidden)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--billions", type=float, choices=MODELS, default=4.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="of the environment with SGLang")
    parser.add_argument("--flags", default="", help="more for the server")
    return parser.parse_args()


if __name__ == "__main__":
    main()
