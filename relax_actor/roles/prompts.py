"""The dataset reader: puts prompts into the TransferQueue as there is room for them.

It keeps no state of its own: which row a position of the prompt stream is, follows from the run's seed, so a
new incarnation goes on where the queue says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_actor.actor import Actor, Reply
from relax_actor.config import Config
from relax_actor.data.dataset import Row, load_dataset
from relax_actor.data.stream import PromptStream, eval_group_id
from relax_actor.data.template import PromptEncoder
from relax_actor.faults import point
from relax_actor.ids import GroupId
from relax_actor.protocol import PromptGroup, Purpose, Wanted
from relax_actor.roles.queue import TransferQueue
from relax_actor.transfer_queue.storage import RowWriter
from transport.shm import SegmentSpaceError, ShmSpace

PARK_S = 20.0
_MEDIA = "media."  # so that no name of the dataset meets one of ours


class Prompts(Actor):
    """Encodes the rows that the queue wants next."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._encoder = PromptEncoder(Path(config.model.path), config.data)
        dataset = self._encoder.encodable(load_dataset(config.data))
        self._rows = dataset.rows
        self._eval_rows = self._load_eval()
        self._stream = PromptStream(len(self._rows), seed=config.run.seed, shuffle=config.data.shuffle)
        self._writer = RowWriter(
            ShmSpace(self.ctx.run_id, self.ctx.shm_root), self.ctx.holder, on_full=self._say_full
        )
        self._queue = self.ctx.ref("queue", TransferQueue)
        self._asking: Reply[Wanted] | None = None
        self._putting: list[Reply[None]] = []
        self.ctx.events.emit("dataset_read", rows=len(self._rows), skipped=dataset.skipped[:20])

    def step(self) -> float | None:
        """Ask what is wanted; put it."""
        self._putting = [reply for reply in self._putting if not reply.done()]
        if self._putting:
            return None
        if self._asking is not None and self._asking.done():
            reply, self._asking = self._asking, None
            if reply.exception() is None:  # else the queue is away: ask its next incarnation
                self._answer(reply.result())
                return 0.0
        if self._asking is None:
            self._asking = self._queue.within(PARK_S * 2).ask(TransferQueue.await_room, PARK_S)
        return None

    def _answer(self, wanted: Wanted) -> None:
        if wanted.groups:
            groups = self._groups(
                [(n, self._rows[self._stream.at(n).row]) for n in wanted.groups],
                samples=self._config.rollout.samples_per_prompt,
            )
            self._putting.append(self._queue.ask(TransferQueue.submit, groups))
        for eval_round in wanted.eval_rounds:
            self._putting.append(
                self._queue.ask(TransferQueue.submit_eval, eval_round, self._eval_groups(eval_round))
            )

    def _eval_groups(self, eval_round: int) -> list[PromptGroup]:
        count = len(self._eval_rows)
        numbered = [
            (eval_group_id(eval_round, index, count), row) for index, row in enumerate(self._eval_rows)
        ]
        samples = self._config.eval.samples_per_prompt
        return self._groups(numbered, samples=samples, eval_round=eval_round)

    def _groups(
        self, numbered: list[tuple[GroupId, Row]], *, samples: int, eval_round: int = -1
    ) -> list[PromptGroup]:
        arrays = [
            {"tokens": np.asarray(self._encoder.encode(row), np.int32), **_prefixed(row.media)}
            for _, row in numbered
        ]
        is_eval = eval_round >= 0
        refs = self._writer.write(arrays)
        point("prompts_written")
        return [
            PromptGroup(
                group_id=group_id,
                tokens=ref["tokens"],
                samples=samples,
                label=row.label,
                origin=row.origin,
                purpose=Purpose.EVAL if is_eval else Purpose.TRAIN,
                eval_set=Path(self._config.eval.path).stem if is_eval else "",
                eval_round=eval_round,
                extra=row.extra,
                media={name: ref[_MEDIA + name] for name in row.media},
            )
            for (group_id, row), ref in zip(numbered, refs, strict=True)
        ]

    def _say_full(self, error: SegmentSpaceError) -> None:
        self.ctx.events.emit("put_waits", reason=str(error))

    def _load_eval(self) -> list[Row]:
        if not self._config.eval.path:
            return []
        rows = self._encoder.encodable(load_dataset(self._config.data, path=self._config.eval.path)).rows
        return rows[: self._config.eval.max_prompts or None]


def _prefixed(media: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {_MEDIA + name: array for name, array in media.items()}
