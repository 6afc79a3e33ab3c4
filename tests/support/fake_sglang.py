"""A process that answers like an SGLang server: scripted tokens, and whatever may go wrong with one.

It knows SGLang's command line as far as the engine uses it, so that `sglang_python` can point to a script
that runs it. What it does wrong is told in FAKE_SGLANG, a JSON object:

    version         what it says it is
    token_s         seconds a token takes
    spans           whether it says which weights sampled which token
    fail            path -> how: a status, "hang", "close", "die"; `path#n` is the n-th call of it only
    lie_version     what /model_info says instead of its weights' version
    slow_start_s    how long it starts
    die_at_start    says something and exits
    far_dies        whether that is for the nodes of other hosts only
    late_abort      whether requests come to their ends before an abort gets to them
    cut_off         how many requests it cuts off unasked
    bad             field -> what /generate answers for it instead
    kv_tokens       what its cache holds
    hold            a file and a number: no request gets more tokens than that while there is the file
    once            a file: where it is there already, all of this but `token_s` is forgotten; else it is made

It is a double of the server, not of our code: tests/sglang holds the real one to the same.
"""

import asyncio
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from fake_nodes import FirstNode, further_node


def option(name: str, default: str = "") -> str:
    """Return the word behind the last `name`."""
    words = sys.argv
    places = [place for place, word in enumerate(words) if word == name]
    return words[places[-1] + 1] if places else default


@functools.cache
def script() -> dict[str, Any]:
    """Return what it is told to do wrong."""
    told = json.loads(os.environ.get("FAKE_SGLANG", "{}"))
    if "once" in told:
        mark = Path(told["once"])
        if mark.exists():
            return {"token_s": told.get("token_s", 0.002)}
        mark.touch()
    return told


def stand_in(folder: Path) -> Path:
    """Make what `rollout.sglang_python` may be: it runs this file, whatever it is asked to run."""
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    path.chmod(0o755)
    return path


def text_of(tokens: Sequence[int]) -> str:
    """Return the text that tokens have here."""
    return "".join(f"<{token}>" for token in tokens)


class Request:
    """One that is being sampled."""

    def __init__(self, body: dict[str, Any], version: str) -> None:
        sampling = body["sampling_params"]
        self.rid, self.prompt = body.get("rid", ""), body["input_ids"]
        self.left = sampling["max_new_tokens"]
        self.stops = set(sampling.get("stop_token_ids") or ())
        self.strings = sampling.get("stop") or ()
        self.tokens: list[int] = []
        self.spans = [{"version": version, "start": 0, "end": 0}]
        self.finish: dict[str, Any] | None = None
        self.done = asyncio.Event()

    def sample(self, version: str) -> None:
        """Add a token: the sum of all before, so that a prefix goes on as it would have."""
        token = (sum(self.prompt) + sum(self.tokens)) % 97 + 3
        self.tokens.append(token)
        if self.spans[-1]["version"] != version:
            self.spans.append(
                {"version": version, "start": len(self.tokens) - 1, "end": len(self.tokens) - 1}
            )
        self.spans[-1]["end"] = len(self.tokens)
        if token in self.stops:
            self.end({"type": "stop", "matched": token})
        elif found := [string for string in self.strings if string in text_of(self.tokens)]:
            self.end({"type": "stop", "matched": found[0]})
        elif len(self.tokens) >= self.left:
            self.end({"type": "length", "length": len(self.tokens)})

    def end(self, finish: dict[str, Any]) -> None:
        """Sample no further."""
        self.finish = finish
        self.done.set()


class Fake:
    """The server."""

    def __init__(self, nodes: FirstNode | None = None) -> None:
        self.script, self.nodes = script(), nodes
        self.version = option("--weight-version", "default")
        self.stream_interval = int(option("--stream-interval", "1"))
        self.requests: dict[str, Request] = {}
        self.calls: dict[str, int] = {}
        self.running = asyncio.Event()
        self.running.set()
        self.in_session = False
        self.released: set[str] = set()
        self.log: list[str] = []
        self.cut_off = int(self.script.get("cut_off", 0))

    async def run(self) -> None:
        """Serve for ever."""
        app = web.Application(client_max_size=1 << 30, middlewares=[self.faults])
        for path in ("/model_info", "/server_info", "/v1/loads"):
            app.router.add_get(path, getattr(self, path.split("/")[-1]))
        for path in (
            "/generate",
            "/abort_request",
            "/pause_generation",
            "/continue_generation",
            "/begin_weight_update",
            "/end_weight_update",
            "/update_weights_from_tensor",
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ):
            app.router.add_post(path, getattr(self, path[1:]))
        app.router.add_get("/asked", self.asked)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(option("--port")), reuse_address=True).start()
        sys.stdout.write("The server is fired up and ready to roll!\n")
        sys.stdout.flush()
        while True:
            await asyncio.sleep(float(self.script.get("token_s", 0.002)))
            if self.running.is_set():
                for request in list(self.requests.values()):
                    self.advance(request)

    def advance(self, request: Request) -> None:
        file, most = self.script.get("hold", ("", 0))
        if file and len(request.tokens) >= most and os.path.exists(file):  # noqa: PTH110 - every few ms
            return
        if self.cut_off and len(request.tokens) == 2:
            self.cut_off -= 1
            request.end({"type": "abort", "message": "no memory"})
        else:
            request.sample(self.version)

    @web.middleware
    async def faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = request.path
        self.calls[path] = self.calls.get(path, 0) + 1
        self.log.append(path)
        faults = self.script.get("fail", {})
        fault = faults.get(f"{path}#{self.calls[path]}", faults.get(path))
        if fault is None:
            return await handler(request)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "close":
            request.transport.abort()
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return web.json_response({"error": {"message": f"told to answer {fault}"}}, status=int(fault))

    # -- what it says of itself

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.script.get("lie_version", self.version)})

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.script.get("version", "0.5.23"),
                "tp_size": int(option("--tp-size", "1")),
                "device": option("--device", "cuda"),
                "max_total_num_tokens": self.script.get("kv_tokens", 4096),
                "enable_memory_saver": "--enable-memory-saver" in sys.argv,
                "enable_deterministic_inference": "--enable-deterministic-inference" in sys.argv,
                "enable_return_routed_experts": "--enable-return-routed-experts" in sys.argv,
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        used = sum(len(each.tokens) for each in self.requests.values())
        return web.json_response({"loads": [{"timestamp": time.time(), "num_used_tokens": used}]})

    async def asked(self, _: web.Request) -> web.Response:
        return web.json_response(self.log)

    # -- sampling

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        await self.running.wait()
        request = Request(body, self.version)
        if not self.script.get("never_generate"):
            self.requests[request.rid] = request
        answer = self.streamed(http, request) if body.get("stream") else self.whole(request)
        try:
            return await answer
        finally:
            self.requests.pop(request.rid, None)

    async def whole(self, request: Request) -> web.Response:
        await request.done.wait()
        return web.json_response(self.answer(request, 0))

    async def streamed(self, http: web.Request, request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        said = 0
        while not request.done.is_set() or said < len(request.tokens) or said == 0:
            await asyncio.sleep(0.001)
            if request.done.is_set() or len(request.tokens) >= said + self.stream_interval:
                answer = self.answer(request, said)
                said = len(request.tokens)
                await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
                if request.done.is_set():
                    break
        await response.write(b"data: [DONE]\n\n")
        return response

    def answer(self, request: Request, said: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": request.finish,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, token, None] for token in request.tokens[said:]],
            "completion_tokens": len(request.tokens),
            "cached_tokens": 0,
        }
        if self.script.get("spans", True) and request.finish:
            meta["weight_versions"] = request.spans
        answer: dict[str, Any] = {"output_ids": request.tokens[said:], "meta_info": meta}
        for name, value in self.script.get("bad", {}).items():
            where = meta if name.startswith("meta.") else answer
            where[name.removeprefix("meta.")] = value
        return answer

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await http.json()
        for rid, request in list(self.requests.items()):
            if body.get("abort_all") or rid.startswith(body.get("rid", "-")):
                while self.script.get("late_abort") and not request.finish:
                    request.sample(self.version)
                request.end({"type": "abort", "message": "Aborted"})
        return web.json_response({})

    # -- weights

    async def pause_generation(self, http: web.Request) -> web.Response:
        self.running.clear()
        if (await http.json()).get("mode", "abort") == "abort":
            for request in self.requests.values():
                request.end({"type": "abort", "message": "Aborted"})
        return web.json_response({})

    async def continue_generation(self, _: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({})

    async def begin_weight_update(self, _: web.Request) -> web.Response:
        self.in_session = True
        return web.json_response({"success": True, "message": ""})

    async def end_weight_update(self, _: web.Request) -> web.Response:
        self.in_session = False
        return web.json_response({"success": True, "message": ""})

    async def update_weights_from_tensor(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.version = body.get("weight_version") or self.version
        return web.json_response({"success": True, "message": "Success."})

    async def init_weights_update_group(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self.nodes.init_group, await http.json())
        return web.json_response({"success": True, "message": "Success."})

    async def update_weights_from_distributed(self, http: web.Request) -> web.Response:
        body = await http.json()
        await asyncio.to_thread(self.nodes.receive, body)
        self.version = body.get("weight_version") or self.version
        return web.json_response({"success": True, "message": "Success."})

    async def destroy_weights_update_group(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "Success."})

    async def release_memory_occupation(self, http: web.Request) -> web.Response:
        self.released |= set((await http.json())["tags"])
        return web.json_response({})

    async def resume_memory_occupation(self, http: web.Request) -> web.Response:
        tags = set((await http.json())["tags"])
        status = 200 if tags <= self.released else 500
        self.released -= tags
        return web.json_response({}, status=status)

    async def flush_cache(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=400 if self.requests else 200)


def main() -> None:
    told = script()
    count, node = int(option("--nnodes", "1")), int(option("--node-rank", "0"))
    if told.get("die_at_start") and (node or not told.get("far_dies")):
        sys.stdout.write("ValueError: no such model\n")
        sys.exit(3)
    time.sleep(float(told.get("slow_start_s", 0)))
    if node:
        further_node(option("--dist-init-addr"), node)
    first = FirstNode(option("--dist-init-addr"), count) if count > 1 else None
    asyncio.run(Fake(first).run())


if __name__ == "__main__":
    main()
