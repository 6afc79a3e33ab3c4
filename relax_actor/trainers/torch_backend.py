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
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from relax_actor.config import ModelConfig, TrainConfig
from relax_actor.errors import UnsupportedRoutingError
from relax_actor.moe import file_names
from relax_actor.rl.apart import merged_versions
from relax_actor.rl.loss import LossTerms, LossTokens, policy_loss, token_weights
from relax_actor.rl.offpolicy import mismatch, mismatch_by_version
from relax_actor.rl.schedule import learning_rate_frac
from relax_actor.trainers.base import MicrobatchStats, TrainSequence, UpdateStats
from relax_actor.trainers.replay import RouteReplay
from relax_actor.trainers.torch_files import read_checkpoint, write_checkpoint
from relax_actor.trainers.torch_offload import Offload
from relax_actor.trainers.torch_optimizer import MasterOptimizer
from relax_actor.trainers.torch_policy import Batch, Scores, TorchPolicy
from relax_actor.trainers.vision_policy import Policy, load_policy

NO_SIGNAL = "no signal"
NOT_FINITE = "gradient is not finite"

_NOTHING = MicrobatchStats(
    tokens=0,
    loss=0.0,
    clipped_tokens=0,
    kl_sum=0.0,
    mismatch_abs_sum=0.0,
    mismatch_k3_sum=0.0,
    max_ratio=0.0,
)


@dataclass(kw_only=True)
class _Update:
    """One optimizer update under way."""

    total_tokens: int
    total_sequences: int
    seen_tokens: int = 0
    seen_sequences: int = 0
    moving_sequences: int = 0
    is_estimate: bool = False

    def see(self, sequences: Sequence[TrainSequence]) -> None:
        self.seen_tokens += sum(len(sequence.response) for sequence in sequences)
        self.seen_sequences += len(sequences)

    def factor(self, aggregation: str) -> float:
        """Return what the gradient is to be multiplied by: 1 where the sizes were right.

        Raises:
            ValueError: they were no estimate, and wrong.
        """
        if not self.is_estimate:
            self._require_complete()
            return 1.0
        if aggregation == "token_mean":
            return self.total_tokens / max(1, self.seen_tokens)
        return self.total_sequences / max(1, self.seen_sequences)

    def _require_complete(self) -> None:
        announced = (self.total_tokens, self.total_sequences)
        if (seen := (self.seen_tokens, self.seen_sequences)) != announced:
            raise ValueError(f"the update began with (tokens, sequences) {announced} and had {seen}")


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
        self._train = train
        self._total_steps = total_steps
        self._folder = Path(model.path)
        self._policy = load_policy(
            self._folder,
            dtype=getattr(torch, model.dtype),
            device="cpu" if starts_offloaded else device,
            temperature=temperature,
        )
        self._model = self._policy.model
        trained = _freeze(self._model, train.frozen)
        self._reference = _frozen_copy(self._policy, temperature) if train.kl_coef else None
        self._replay = _start_replay(self._policy, self._folder, train) if train.use_r3 else None
        self._optimizer = MasterOptimizer(trained, train)
        self._offload = Offload(self._tensors, device, is_offloaded=starts_offloaded)
        self._updates_done = 0
        self._update: _Update | None = None

    def begin_update(self, *, total_tokens: int, total_sequences: int, is_estimate: bool = False) -> None:
        """Start one optimizer update; see the protocol."""
        self._update = _Update(
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
        moving = [sequence for sequence in microbatch if self._moves(sequence)]
        update.moving_sequences += len(moving)
        stats = _NOTHING
        for work in self._policy.pack(moving):
            stats = _merged(stats, self._backward(work, update))
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

    def _current_update(self) -> _Update:
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

    def _moves(self, sequence: TrainSequence) -> bool:
        return sequence.advantage != 0 or self._feels_kl(sequence)

    def _feels_kl(self, sequence: TrainSequence) -> bool:
        has_signal = sequence.advantage != 0 if sequence.has_signal is None else sequence.has_signal
        return self._train.kl_coef != 0 and (has_signal or self._train.kl_without_signal)

    def _backward(self, work: Batch, update: _Update) -> MicrobatchStats:
        scores = self._policy.score(work)
        tokens = self._loss_tokens(work, scores, update)
        terms = policy_loss(
            tokens,
            clip_low=self._train.clip_low,
            clip_high=self._train.clip_high,
            tis_max=self._train.tis_max,
            kl_coef=self._train.kl_coef,
            ratio_base=self._train.ratio_base,
        )
        terms.loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gather()
        return _stats(work, tokens, terms, scores, self._replay)

    def _loss_tokens(self, work: Batch, scores: Scores, update: _Update) -> LossTokens:
        weights = token_weights(
            work.lengths,
            aggregation=self._train.loss_aggregation,
            total_tokens=update.total_tokens,
            total_sequences=update.total_sequences,
        )
        feels_kl = work.per_token([float(self._feels_kl(sequence)) for sequence in work.sequences])
        return LossTokens(
            logprobs=scores.logprobs,
            start_logprobs=_start_logprobs(work, scores.logprobs.detach()),
            rollout_logprobs=work.joined("rollout_logprobs"),
            advantages=work.per_token([sequence.advantage for sequence in work.sequences]),
            weights=weights,
            reference_logprobs=self._reference_logprobs(work),
            kl_weights=weights * feels_kl,
        )

    @torch.no_grad()
    def _reference_logprobs(self, work: Batch) -> Tensor | None:
        return self._reference.score(work).logprobs if self._reference else None


def _freeze(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Freeze what matches and return the rest, by name.

    Raises:
        ValueError: a pattern matches nothing, or nothing is left.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(f"`train.frozen` pattern {pattern!r} matches none of {len(names)} parameters")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in patterns))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("`train.frozen` freezes every parameter")
    return trained


def _frozen_copy(policy: Policy, temperature: float) -> Policy:
    model = copy.deepcopy(policy.model).requires_grad_(requires_grad=False)
    return type(policy)(model, temperature=temperature)


def _start_logprobs(work: Batch, current: Tensor) -> Tensor:
    """Return the log-probs at the start of the step, the current ones where none were given."""
    parts = torch.split(current, work.lengths.tolist())
    return torch.cat(
        [
            part if sequence.old_logprobs is None else torch.tensor(sequence.old_logprobs)
            for part, sequence in zip(parts, work.sequences, strict=True)
        ]
    )


def _start_replay(policy: Policy, folder: Path, train: TrainConfig) -> RouteReplay:
    if not isinstance(policy, TorchPolicy):
        raise UnsupportedRoutingError(
            f"the model in {folder}", "reads images, and its routes are not replayed"
        )
    policy.replay = RouteReplay(policy.model, folder, train)
    return policy.replay


def _stats(
    work: Batch, tokens: LossTokens, terms: LossTerms, scores: Scores, replay: RouteReplay | None
) -> MicrobatchStats:
    apart = mismatch(tokens.start_logprobs, tokens.rollout_logprobs)
    by_version = {}
    if all(sequence.versions is not None for sequence in work.sequences):
        by_version = mismatch_by_version(
            tokens.start_logprobs, tokens.rollout_logprobs, work.joined("versions")
        )
    places, places_apart = replay.take_counts() if replay else (0, 0)
    return MicrobatchStats(
        tokens=tokens.logprobs.numel(),
        loss=terms.loss.item(),
        clipped_tokens=terms.clipped_tokens,
        kl_sum=terms.kl_sum,
        mismatch_abs_sum=apart.abs_sum,
        mismatch_k3_sum=apart.k3_sum,
        max_ratio=apart.max_ratio,
        entropy_sum=scores.entropies.sum().item(),
        by_version=by_version,
        routed_places=places,
        routed_apart=places_apart,
    )


def _merged(left: MicrobatchStats, right: MicrobatchStats) -> MicrobatchStats:
    """Add two sums; of ratios keep the larger."""
    summed = [name for name in MicrobatchStats.__struct_fields__ if name not in {"max_ratio", "by_version"}]
    fields: dict[str, Any] = {name: getattr(left, name) + getattr(right, name) for name in summed}
    return MicrobatchStats(
        **fields,
        max_ratio=max(left.max_ratio, right.max_ratio),
        by_version=merged_versions([left.by_version, right.by_version]),
    )
