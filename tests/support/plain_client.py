"""The plainest client of an SGLang server: one connection a call, in the calling thread or one of its own."""

import http.client
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

HASTE_S = 0.3


class AnswerError(Exception):
    """An answer that is not a 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        self.path, self.status, self.text = path, status, text
        super().__init__(f"{path} answered {status}: {text[:300]}")


class PlainClient:
    """Speaks to a server on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._threads = ThreadPoolExecutor(64)
        self._counts: Counter[str] = Counter()
        self._hasty: set[tuple[str, int]] = set()

    def hurry_at(self, path: str, nth: int) -> None:
        """Wait for the nth answer of a path for a moment only, whatever the deadline."""
        self._hasty.add((path, nth))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float) -> Any:
        return self._call("POST", path, body or {}, deadline_s)

    def get(self, path: str, *, deadline_s: float) -> Any:
        return self._call("GET", path, None, deadline_s)

    def start(self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float) -> Future[Any]:
        return self._threads.submit(self.post, path, body, deadline_s=deadline_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        self._counts[path] += 1
        patience_s = HASTE_S if (path, self._counts[path]) in self._hasty else deadline_s
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=patience_s)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise AnswerError(path, answer.status, text)
        try:
            return json.loads(text)
        except ValueError:
            return text
