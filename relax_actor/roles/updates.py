"""How a batch becomes optimizer updates: once it is whole, or while its groups still come."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from relax_actor.config import Config
from relax_actor.rl.batching import Cut, plan_updates
from relax_actor.roles.step_stats import StepStats
from relax_actor.trainers.base import TrainerBackend, TrainSequence


class Updates(Protocol):
    """What the trainer needs of either way."""

    def restart(self) -> None:
        """Forget what came of a batch: it begins again."""
        ...

    def train(
        self, sequences: Sequence[TrainSequence], stats: StepStats, *, is_whole: bool
    ) -> Iterator[None]:
        """Train on what has come; yields between micro-batches.

        Args:
            sequences: whole groups.
            stats: told of every micro-batch and update.
            is_whole: whether the batch ends with them.
        """
        ...


def make_updates(backend: TrainerBackend, config: Config, before_update: Callable[[], None]) -> Updates:
    """Make the way that the configuration asks for.

    Args:
        backend: trains.
        config: the run's.
        before_update: called before the weights change.
    """
    kind = StreamedUpdate if config.train.stream_micro_batches else WholeUpdates
    return kind(backend, config, before_update)


class WholeUpdates:
    """Plans the updates of a whole batch."""

    def __init__(self, backend: TrainerBackend, config: Config, before_update: Callable[[], None]) -> None:
        self._backend, self._train, self._before_update = backend, config.train, before_update
        self._cut = _cut(config)

    def restart(self) -> None:
        """Nothing of a batch is kept."""

    def train(
        self,
        sequences: Sequence[TrainSequence],
        stats: StepStats,
        *,
        is_whole: bool,  # noqa: ARG002 - the protocol's; it always is
    ) -> Iterator[None]:
        """Train; see the protocol."""
        if self._train.updates_per_batch > 1 and self._train.ratio_base == "trainer":
            for sequence, old in zip(sequences, self._backend.logprobs(sequences), strict=True):
                sequence.old_logprobs = old
        for microbatches in plan_updates(sequences, updates=self._train.updates_per_batch, cut=self._cut):
            members = [sequence for microbatch in microbatches for sequence in microbatch]
            self._backend.begin_update(
                total_tokens=sum(len(each.response) for each in members), total_sequences=len(members)
            )
            for microbatch in microbatches:
                stats.add(self._backend.accumulate(microbatch))
                yield
            self._before_update()
            stats.updated(self._backend.finish_update())


class StreamedUpdate:
    """One update, begun before its sizes are known.

    Where its micro-batches begin and end depends on the order of the groups alone, not on when they come: in
    a run whose batches are always the same, so are the weights.
    """

    def __init__(self, backend: TrainerBackend, config: Config, before_update: Callable[[], None]) -> None:
        self._backend, self._before_update = backend, before_update
        self._cut = _cut(config)
        self._sequences = config.train.global_batch_size
        # A power of two, so that putting it right rounds each gradient once.
        self._tokens = 1 << (self._sequences * config.rollout.max_new_tokens // 2).bit_length()
        self.restart()

    def restart(self) -> None:
        """Forget the gradient and what has not gone into it."""
        self._is_begun = False
        self._rest: list[TrainSequence] = []

    def train(
        self, sequences: Sequence[TrainSequence], stats: StepStats, *, is_whole: bool
    ) -> Iterator[None]:
        """Train; see the protocol."""
        if not self._is_begun:
            self._is_begun = True
            self._backend.begin_update(
                total_tokens=self._tokens, total_sequences=self._sequences, is_estimate=True
            )
        microbatches, self._rest = self._cut.full([*self._rest, *sequences])
        if is_whole and self._rest:
            microbatches.append(self._rest)
        for microbatch in microbatches:
            stats.add(self._backend.accumulate(microbatch))
            yield
        if is_whole:
            self._before_update()
            stats.updated(self._backend.finish_update())
            self.restart()


def _cut(config: Config) -> Cut[TrainSequence]:
    train = config.train
    return Cut(
        size=train.micro_batch_size,
        max_tokens=train.max_tokens_per_micro_batch,
        tokens=lambda sequence: len(sequence.prompt) + len(sequence.response),
    )
