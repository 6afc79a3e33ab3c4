"""An SGLang server with dummy weights and nothing of ours round it, for benchmarks that speak to it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from plain_client import AnswerError, PlainClient


@contextlib.contextmanager
def served(folder: Path, log: Path, *, python: str, tp: int, flags: str) -> Iterator[PlainClient]:
    """Serve a model with dummy weights.

    Args:
        folder: of the model.
        log: where the server's output goes.
        python: of the environment with SGLang.
        tp: GPUs.
        flags: more for the server.
    """
    port = _free_port()
    words = f"--host 127.0.0.1 --port {port} --nccl-port {_free_port()} --tp-size {tp} --random-seed 1"
    words += " --load-format dummy --weight-version uninit --skip-tokenizer-init --mem-fraction-static 0.5"
    words += f" --context-length 32768 {flags}"
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "NCCL_NVLS_ENABLE": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "sglang.launch_server", "--model-path", str(folder), *words.split()],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
    client = PlainClient(port)
    try:
        _wait(client, process, log)
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        client.close()


def _wait(client: PlainClient, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server generates a token."""
    deadline = time.monotonic() + 400
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, AnswerError):
            client.post("/generate", body, deadline_s=60)
            return
        time.sleep(0.5)
    raise SystemExit(f"the server did not come up: see {log}")


def _free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
