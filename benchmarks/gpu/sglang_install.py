"""Policy versions into SGLang on GPUs: seconds by bucket size, and what running requests notice of it.

    python benchmarks/gpu/sglang_install.py OUT.json [--billions 4] [--tp 1] [--python PYTHON] [--flags "..."]

A server with a random Qwen3 of the asked size and dummy weights; the weights that are installed are made on
its GPU. `--flags` are for the machine, such as "--attention-backend triton --sampling-backend pytorch". Each
row is an update; those of one bucket size are in turn with those of the others.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
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
from common import commit, machine, spread  # noqa: E402
from plain_client import AnswerError, PlainClient  # noqa: E402

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
SHAPES = {  # hidden, layers, intermediate, heads, key-value heads
    0.6: (1024, 28, 3072, 16, 8),
    1.7: (2048, 28, 6144, 16, 8),
    4.0: (2560, 36, 9728, 32, 8),
    8.0: (4096, 36, 12288, 32, 8),
}
VOCABULARY = 151_936


def main() -> None:
    """Serve, measure, write."""
    args = parsed()
    result: dict[str, Any] = {
        "benchmark": "gpu-sglang-install",
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("BENCH_COMMIT") or commit(),
        "command": " ".join(["python", "benchmarks/gpu/sglang_install.py", *sys.argv[1:]]),
        "machine": machine(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.billions)
        with served(args, Path(folder)) as client:
            bench = Bench(client, args, Path(folder))
            result["sglang"] = ".".join(map(str, bench.facts.version))
            for name, part in bench.parts():
                result[name] = part()
                args.out.write_text(json.dumps(result, indent=1) + "\n")  # a cut-off run keeps its rows
    print(json.dumps(result))


class Bench:
    """One server and what is measured of it."""

    def __init__(self, client: PlainClient, args: argparse.Namespace, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.facts = capabilities(client.get("/server_info", deadline_s=30))
        self.placement = WeightPlacement(
            device="cuda:0", server_devices=tuple(f"cuda:{n}" for n in range(args.tp)), ranks=args.tp
        )
        self.version = 0
        self.weights = dict(random_weights(args.billions))

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


def write_config(folder: Path, billions: float) -> None:
    """Write a model folder without weights."""
    hidden, layers, intermediate, heads, kv_heads = SHAPES[billions]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def random_weights(billions: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights of that model, bfloat16 on the GPU."""
    hidden, layers, intermediate, heads, kv_heads = SHAPES[billions]
    shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (heads * 128, hidden),
            f"{name}self_attn.k_proj.weight": (kv_heads * 128, hidden),
            f"{name}self_attn.v_proj.weight": (kv_heads * 128, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, heads * 128),
            f"{name}self_attn.q_norm.weight": (128,),
            f"{name}self_attn.k_norm.weight": (128,),
            f"{name}mlp.gate_proj.weight": (intermediate, hidden),
            f"{name}mlp.up_proj.weight": (intermediate, hidden),
            f"{name}mlp.down_proj.weight": (hidden, intermediate),
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
        }
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        else:
            yield name, torch.randn(shape, dtype=torch.bfloat16, device="cuda") / math.sqrt(hidden)


@contextlib.contextmanager
def served(args: argparse.Namespace, folder: Path) -> Iterator[PlainClient]:
    """Serve the model; its log is beside the result."""
    port = free_port()
    flags = f"--host 127.0.0.1 --port {port} --nccl-port {free_port()} --tp-size {args.tp} --random-seed 1"
    flags += " --load-format dummy --weight-version uninit --skip-tokenizer-init --mem-fraction-static 0.5"
    flags += f" --context-length 32768 --max-running-requests {REQUESTS} {args.flags}"
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "NCCL_NVLS_ENABLE": "0"}
    with args.out.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [args.python, "-m", "sglang.launch_server", "--model-path", str(folder), *flags.split()],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
    client = PlainClient(port)
    try:
        wait(client, process)
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        client.close()


def wait(client: PlainClient, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server generates a token."""
    deadline = time.monotonic() + 400
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, AnswerError):
            client.post("/generate", body, deadline_s=60)
            return
        time.sleep(0.5)
    raise SystemExit("the server did not come up: see the log beside the result")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--billions", type=float, choices=sorted(SHAPES), default=4.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="of the environment with SGLang")
    parser.add_argument("--flags", default="", help="more for the server")
    return parser.parse_args()


if __name__ == "__main__":
    main()
