"""The torch training backend: any Hugging Face language model, with images or not, on a CPU or one GPU.

One optimizer update is `begin_update`, any number of `accumulate`, `finish_update`. The model computes
in its own dtype, gradients gather in float32. Nothing here is random, so the same calls give the same
weights bit for bit, also across `save` and `load` (on a CPU, or with `train.deterministic`).

A sequence that cannot move the weights, because its advantage is 0 and it feels no KL term, is not
computed at all. An update of nothing else is skipped, and so is one whose gradient is not finite:
otherwise AdamW would still move the weights by its momentum, or ruin them.
"""

import copy
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_actor.config import ModelConfig, TrainConfig
from relax_actor.errors import UnsupportedRoutingError
from relax_actor.moe import file_names
from relax_actor.rl.schedule import learning_rate_frac
from relax_actor.trainers.base import MicrobatchStats, TrainSequence, UpdateStats
from relax_actor.trainers.replay import RouteReplay
from relax_actor.trainers.torch_files import read_checkpoint, write_checkpoint
from relax_actor.trainers.torch_loss import NOTHING, Objective, batch_stats, merged
from relax_actor.trainers.torch_offload import Offload
from relax_actor.trainers.torch_optimizer import MasterOptimizer, freeze
from relax_actor.trainers.torch_policy import Batch, TorchPolicy
from relax_actor.trainers.torch_update import Update
from relax_actor.trainers.vision_policy import Policy, load_policy

NO_SIGNAL = "no signal"
NOT_FINITE = "gradient is not finite"


class TorchBackend:
    """A `relax_actor.trainers.base.TrainerBackend` on plain torch.

    Args:
        model: folder and dtype; rollouts get their weights in the same dtype.
        train: loss, optimizer and schedule.
        temperature: what rollouts divide logits by; 0 (greedy) counts as 1.
        total_steps: steps of the whole run, each of `train.updates_per_batch` updates; the end of
            the schedule.
        device: `cpu`, `cuda` or `cuda:0`.
        starts_offloaded: begin in host memory, whatever the device, until `onload`.

    Raises:
        UnsupportedModelError: the model's log-probs would be wrong.
        UnsupportedRoutingError: routes are to be replayed in a model without experts, or of an unknown kind.
        ValueError: a pattern of `train.frozen` matches nothing, or all is frozen.
        OSError: the folder is no model folder.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        temperature: float = 1.0,
        total_steps: int,
        device: str = "cpu",
        starts_offloaded: bool = False,
    ) -> None:
        torch.set_num_threads(train.threads)
        if train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses to be so
            torch.use_deterministic_algorithms(mode=True)
        self._train, self._objective = train, Objective(train)
        self._total_steps = total_steps
        self._folder = Path(model.path)
        self._policy = load_policy(
            self._folder,
            dtype=getattr(torch, model.dtype),
            device="cpu" if starts_offloaded else device,
            temperature=temperature,
        )
        self._model = self._policy.model
        trained = freeze(self._model, train.frozen)
        self._reference = _frozen_copy(self._policy, temperature) if train.kl_coef else None
        self._replay = _start_replay(self._policy, self._folder, train) if train.use_r3 else None
        self._optimizer = MasterOptimizer(trained, train)
        self._offload = Offload(self._tensors, device, is_offloaded=starts_offloaded)
        self._updates_done = 0
        self._update: Update | None = None

    def begin_update(self, *, total_tokens: int, total_sequences: int, is_estimate: bool = False) -> None:
        """Start one optimizer update; see the protocol."""
        self._update = Update(
            total_tokens=total_tokens, total_sequences=total_sequences, is_estimate=is_estimate
        )
        self._optimizer.clear()

    def accumulate(self, microbatch: Sequence[TrainSequence]) -> MicrobatchStats:
        """Forward and backward over those sequences that can move the weights.

        Returns:
            Sums over the tokens that went through the model; `tokens` is 0 where none did.

        Raises:
            RuntimeError: no update has begun.
            ValueError: a sequence has no prompt or no response, or log-probs or routes of another length.
            RoutingMismatchError: with `train.r3_replay_mode` "check", if routes differ from the trainer's.
        """
        update = self._current_update()
        update.see(microbatch)
        moving = [sequence for sequence in microbatch if self._objective.moves(sequence)]
        update.moving_sequences += len(moving)
        stats = NOTHING
        for work in self._policy.pack(moving):
            stats = merged(stats, self._backward(work, update))
        return stats

    def finish_update(self) -> UpdateStats:
        """Clip, check that the gradient is finite, step, advance the learning rate.

        The learning rate is a function of the number of finished updates, skipped ones included:
        how far the run has come, not how often it had something to learn.

        Raises:
            RuntimeError: no update has begun.
            ValueError: the update had other sizes than `begin_update` was told.
        """
        update, self._update = self._current_update(), None
        factor = update.factor(self._train.loss_aggregation)
        learning_rate = self._learning_rate()
        self._updates_done += 1
        if not update.moving_sequences:
            return UpdateStats(grad_norm=0.0, learning_rate=learning_rate, skipped=NO_SIGNAL)
        if factor != 1.0:
            self._optimizer.scale(factor)
        norm = self._optimizer.clip()
        skipped = "" if math.isfinite(norm) else NOT_FINITE
        if skipped:
            self._optimizer.clear()
        else:
            self._optimizer.step(learning_rate)
        return UpdateStats(grad_norm=norm, learning_rate=learning_rate, skipped=skipped, loss_factor=factor)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Return each response token's log-prob under the current weights, [n] each, natural log.

        Raises:
            ValueError: as `accumulate`.
        """
        return [
            part.numpy()
            for work in self._policy.pack(sequences)
            for part in torch.split(self._policy.score(work).logprobs, work.lengths.tolist())
        ]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, frozen ones too, in the model's dtype and always in one order.

        The names are those of the model's `named_parameters()`; where it has experts, those of its files.
        Tied weights come once, under the name of the input embedding (`model.embed_tokens.weight`, no
        `lm_head.weight`). The tensors are the live ones: copy them before the next update.
        """
        kind = self._model.config.get_text_config().model_type
        for name, parameter in file_names(kind, self._model.named_parameters()):
            yield name, parameter.detach()

    def offload(self) -> None:
        """Move weights and optimizer to host memory, and forget gradients; see the protocol."""
        self._optimizer.clear()
        self._offload.offload()

    def onload(self) -> None:
        """Move them to the device; see the protocol."""
        self._offload.onload()

    def _tensors(self) -> Iterator[Tensor]:
        models = [self._model] if self._reference is None else [self._model, self._reference.model]
        for model in models:
            yield from model.parameters()
            yield from model.buffers()
        yield from self._optimizer.tensors()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into an existing, empty folder.

        `model/` in it is a Hugging Face model folder with the tokenizer, to use as it is.
        """
        write_checkpoint(
            folder, self._model, self._optimizer.state(), updates_done=self._updates_done, origin=self._folder
        )

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; training continues bit for bit.

        The reference of the KL term stays the model this backend was constructed from.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the checkpoint is of another model or optimizer.
        """
        saved = read_checkpoint(folder, self._model)
        self._optimizer.load_state(saved.optimizer)
        self._updates_done = saved.updates_done
        self._update = None

    def _current_update(self) -> Update:
        if self._update is None:
            raise RuntimeError("no update has begun: call begin_update first")
        return self._update

    def _learning_rate(self) -> float:
        train = self._train
        return train.learning_rate * learning_rate_frac(
            self._updates_done,
            warmup=train.warmup_steps * train.updates_per_batch,
            total=self._total_steps * train.updates_per_batch,
            linear=train.lr_schedule == "linear",
            min_frac=train.min_lr_frac,
        )

    def _backward(self, work: Batch, update: Update) -> MicrobatchStats:
        scores = self._policy.score(work)
        loss = self._objective.loss(work, scores.logprobs, self._reference_logprobs(work), update)
        loss.terms.loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gather()
        return batch_stats(work, loss, scores, self._replay)

    @torch.no_grad()
    def _reference_logprobs(self, work: Batch) -> Tensor | None:
        return self._reference.score(work).logprobs if self._reference else None


def _frozen_copy(policy: Policy, temperature: float) -> Policy:
    model = copy.deepcopy(policy.model).requires_grad_(requires_grad=False)
    return type(policy)(model, temperature=temperature)


def _start_replay(policy: Policy, folder: Path, train: TrainConfig) -> RouteReplay:
    if not isinstance(policy, TorchPolicy):
        raise UnsupportedRoutingError(
            f"the model in {folder}", "reads images, and its routes are not replayed"
        )
    policy.replay = RouteReplay(policy.model, folder, train)
    return policy.replay
