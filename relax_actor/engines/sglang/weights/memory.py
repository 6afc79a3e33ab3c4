"""A server lends its GPU memory to the trainer beside it, and takes it back.

What is given back is lost: the cache is flushed, and the weights are undefined until the next install.
SGLang ends the whole server when it is asked for memory that is in use, or asked to resume what was not
released, so neither is ever asked.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from relax_actor.engines.sglang.weights.calls import Calls
from relax_actor.engines.sglang.weights.records import Client, Deadlines

_RELEASE = "/release_memory_occupation"
_RESUME = "/resume_memory_occupation"


class MemoryTag(StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


ALL: Final = frozenset(MemoryTag)


class ServerMemory:
    """What of a server's memory is released.

    Args:
        client: of the server.
        is_supported: whether it was started with a memory saver.
        deadlines: of the calls.
    """

    def __init__(self, client: Client, *, is_supported: bool, deadlines: Deadlines | None = None) -> None:
        self._client, self._is_supported = client, is_supported
        self._deadlines = deadlines or Deadlines()
        self._released: frozenset[MemoryTag] = frozenset()

    @property
    def released(self) -> frozenset[MemoryTag]:
        """What the server does not have now; where it is anything, nothing may be sent to it."""
        return self._released

    def release(self, tags: Iterable[MemoryTag] = ALL, *, in_flight: int) -> None:
        """Give memory back; what is released already stays so.

        Args:
            tags: which memory.
            in_flight: requests in the server.

        Raises:
            ValueError: there are some, or the server cannot do this.
            SglangUpdateError: it failed: the server is in doubt.
        """
        if not self._is_supported:
            raise ValueError("the server has no memory saver\n\nhint: start it with --enable-memory-saver")
        if in_flight:
            raise ValueError(f"memory of a server with {in_flight} requests in flight cannot be released")
        asked = frozenset(tags) - self._released
        if asked:
            self._call("release", _RELEASE, asked)
            self._released |= asked

    def resume(self, tags: Iterable[MemoryTag] = ALL) -> None:
        """Take memory back, of what was released; weights are undefined until they are installed.

        Weights may be resumed and installed before the cache is, so that both sides need less at once.

        Raises:
            SglangUpdateError: it failed: the server is in doubt.
        """
        asked = frozenset(tags) & self._released
        if asked:
            self._call("resume", _RESUME, asked)
            self._released -= asked

    def _call(self, step: str, path: str, tags: frozenset[MemoryTag]) -> None:
        body = {"tags": sorted(tag.value for tag in tags)}
        Calls(self._client, None).post(step, path, body, self._deadlines.of())
