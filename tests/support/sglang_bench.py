"""One real SGLang server on the CPU for many tests: each gets its engine as if it were new."""

from pathlib import Path
from typing import Any

import msgspec

from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.states import EngineState
from relax_actor.engines.sglang.weights import Updater, UpdateSettings

BUCKET_BYTES = 100_000
"""So that a tiny model has several buckets."""


class SglangBench:
    """Hands out the engine of one server, and starts another server only after a test has ended the last.

    Args:
        python: the interpreter that runs SGLang.
        folder: for the servers' logs.
        update_mode: of the engines.
        server: fields of `ServerSettings` that are to be others.
    """

    def __init__(self, python: Path, folder: Path, *, update_mode: str = "auto", **server: Any) -> None:
        self._python, self._folder, self._update_mode, self._server = python, folder, update_mode, server
        self._engine: SglangEngine | None = None
        self.starts = 0

    def engine(
        self,
        model: Path,
        *,
        vocabulary: int,
        context: int,
        slots: int = 16,
        stream: bool = False,
        expert_shape: tuple[int, int] | None = None,
    ) -> SglangEngine:
        """Return the engine without a version and without requests.

        Args:
            model: a folder with its config; the same at each call.
            vocabulary: of the model.
            context: in tokens.
            slots: at most 16.
            stream: whether tokens are heard of as they come.
            expert_shape: layers and experts a token, where `server` has `routed_experts`.
        """
        if self._engine is None or self._engine.state is EngineState.DOWN:
            self._engine = self._started(model, vocabulary, context)
        renew(self._engine, slots=slots, stream=stream, expert_shape=expert_shape)
        return self._engine

    def close(self) -> None:
        """Kill the server."""
        if self._engine is not None:
            self._engine.close()

    def _started(self, model: Path, vocabulary: int, context: int) -> SglangEngine:
        self.starts += 1
        return SglangEngine(
            ServerSettings(
                model=str(model),
                python=str(self._python),
                context_tokens=context,
                slots=16,
                dtype="float32",
                stream_tokens=1,
                **self._server,
            ),
            GenerationSettings(seed=0),
            lambda client, found: Updater(client, found, UpdateSettings(bucket_bytes=BUCKET_BYTES)),
            vocabulary=vocabulary,
            log=self._folder / f"server-{self.starts}.log",
            update_mode=self._update_mode,
        )


def renew(engine: SglangEngine, *, slots: int, **generation: Any) -> None:
    """Take an engine's requests and version from it; its server goes on, with weights that nobody may use."""
    engine.abort(list(engine.lengths()))
    engine.refused()
    samples = engine._generation._samples
    samples.take_finished()
    for part in (engine._generation, samples):
        part._settings = msgspec.structs.replace(part._settings, **generation)
    engine._settings = msgspec.structs.replace(engine._settings, slots=slots)
    engine._life._state = EngineState.UNSYNCED
    engine._version, engine._lowest_version = None, 0
