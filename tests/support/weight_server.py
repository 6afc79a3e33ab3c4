"""A server with SGLang's calls for weights and nothing else: as strict as the real one, unreliable on demand.

It runs in a thread of the test, keeps what it is sent, and follows SGLang's rules: no bucket outside of a
session (from 0.5.21 on), no flush with requests, an unpickler that builds nothing that is not on its list.
"""

import base64
import io
import json
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ALLOWED = frozenset(
    {
        ("types", "SimpleNamespace"),
        ("torch", "Size"),
        ("torch", "uint8"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("torch", "float16"),
        ("torch", "int64"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
    }
)
"""What a payload on a CPU may be made of: a part of SGLang's own list."""


class StrictUnpickler(pickle.Unpickler):
    """Builds what is allowed."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


class WeightServer:
    """The state of the server, and how it misbehaves.

    Args:
        version: of SGLang.
    """

    tp = 1
    device = "cpu"

    def __init__(self, version: tuple[int, ...] = (0, 5, 23)) -> None:
        self.version = version
        self.weights: dict[str, Any] = {}
        self.weight_version = "uninit"
        self.is_paused = self.in_session = False
        self.requests = 0
        self.digest = "d"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[tuple[str, int], str] = {}
        self.released: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._hold = threading.Event()

    @property
    def weight_sessions(self) -> bool:
        return self.version >= (0, 5, 21)

    @property
    def retract(self) -> bool:
        return self.version >= (0, 5, 21)

    @property
    def paths(self) -> list[str]:
        """What was called, in order."""
        return [path for path, _ in self.calls]

    def break_at(self, path: str, how: str, nth: int = 1) -> None:
        """Answer the nth call of a path by `false`, `400`, `500`, `close`, `hang`, or a `lie` of success."""
        self.faults[path, nth] = how

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Serve; yields the port."""
        state = self

        class Handler(_Handler):
            server_state = state

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            self._hold.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        """Return status and content; None closes the connection."""
        self.calls.append((path, body))
        self._counts[path] += 1
        fault = self.faults.get((path, self._counts[path]))
        if fault == "hang":
            self._hold.wait()  # for as long as it serves
        if fault in {"hang", "close"}:
            return None
        if fault in {"400", "500"}:
            return int(fault), {"success": False, "message": "on demand"}
        if fault == "false":
            return 200, {"success": False, "message": "on demand"}
        if fault == "lie":
            return 200, {"success": True, "message": "not done"}
        return getattr(self, "on_" + path.strip("/"))(body)

    def on_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.is_paused = True
        return 200, {"status": "ok", "mode": body["mode"]}

    def on_continue_generation(self, _: dict[str, Any]) -> tuple[int, Any]:
        self.is_paused = False
        return 200, {"status": "ok"}

    def on_begin_weight_update(self, _: dict[str, Any]) -> tuple[int, Any]:
        if self.in_session or not self.weight_sessions:
            return _refused("a weight-update session is already open")
        self.in_session = True
        return _done()

    def on_end_weight_update(self, _: dict[str, Any]) -> tuple[int, Any]:
        if not self.in_session:
            return _refused("no weight-update session is open")
        self.in_session = False
        return _done()

    def on_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.weight_sessions != self.in_session or body["flush_cache"]:
            return _refused("must run between begin_weight_update() and end_weight_update()")
        content = StrictUnpickler(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0]))).load()
        for meta in content["metadata"]:
            part = content["flattened_tensor"][meta.start_idx : meta.end_idx]
            self.weights[meta.name] = part.view(meta.dtype).reshape(meta.shape)
        return self._loaded(body)

    def on_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        from pathlib import Path

        from safetensors.torch import load_file

        if self.in_session or not (Path(body["model_path"]) / "config.json").exists():
            return _refused("not a model, or in a session")
        for path in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.weights |= load_file(path)
        return self._loaded(body)

    def on_init_weights_update_group(self, _: dict[str, Any]) -> tuple[int, Any]:
        return _refused("this server joins nothing")

    def on_flush_cache(self, _: dict[str, Any]) -> tuple[int, Any]:
        return (400, "requests are present") if self.requests else (200, "Cache flushed.")

    def on_model_info(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.weight_version}

    def on_weights_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        digest = "nothing" if body.get("skip_tensor_list") == [""] else self.digest
        return 200, {"success": True, "message": "", "per_engine_checksum": digest}

    def on_release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.released |= set(body["tags"])
        return 200, None

    def on_resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not set(body["tags"]) <= self.released:
            return 500, "KeyError"
        self.released -= set(body["tags"])
        return 200, None

    def _loaded(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
        return _done()


class _Handler(BaseHTTPRequestHandler):
    wbufsize = -1  # one packet an answer
    server_state: WeightServer

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(text) if text else {})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""

    def _answer(self, body: dict[str, Any]) -> None:
        answer = self.server_state.answer(self.path, body)
        if answer is None:
            self.close_connection = True
            return
        content = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _done() -> tuple[int, Any]:
    return 200, {"success": True, "message": "Success"}


def _refused(why: str) -> tuple[int, Any]:
    return 400, {"success": False, "message": why}
