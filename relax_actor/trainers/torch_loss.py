"""From what a model says of a batch to its loss, and to the sums that a step tells of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_actor.config import TrainConfig
from relax_actor.rl.apart import merged_versions
from relax_actor.rl.loss import LossTerms, LossTokens, policy_loss, token_weights
from relax_actor.rl.offpolicy import mismatch, mismatch_by_version
from relax_actor.trainers.base import MicrobatchStats, TrainSequence
from relax_actor.trainers.replay import RouteReplay
from relax_actor.trainers.torch_policy import Batch, Scores
from relax_actor.trainers.torch_update import Update

NOTHING = MicrobatchStats(
    tokens=0,
    loss=0.0,
    clipped_tokens=0,
    kl_sum=0.0,
    mismatch_abs_sum=0.0,
    mismatch_k3_sum=0.0,
    max_ratio=0.0,
)
"""The sums over no tokens."""


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """A batch's loss, and what it was computed from."""

    tokens: LossTokens
    terms: LossTerms


class Objective:
    """What is minimised.

    Args:
        train: clipping, KL term and aggregation.
    """

    def __init__(self, train: TrainConfig) -> None:
        self._train = train

    def moves(self, sequence: TrainSequence) -> bool:
        """Return whether a sequence can move the weights."""
        return sequence.advantage != 0 or self._feels_kl(sequence)

    def loss(
        self, work: Batch, logprobs: Tensor, reference_logprobs: Tensor | None, update: Update
    ) -> BatchLoss:
        """Return a batch's share in the loss of an update.

        Args:
            work: the sequences.
            logprobs: of the response tokens under the weights at hand, float32 [tokens], with gradient.
            reference_logprobs: of the model that the KL term holds to, float32 [tokens].
            update: what the batch is part of.
        """
        tokens = self._tokens(work, logprobs, reference_logprobs, update)
        terms = policy_loss(
            tokens,
            clip_low=self._train.clip_low,
            clip_high=self._train.clip_high,
            tis_max=self._train.tis_max,
            kl_coef=self._train.kl_coef,
            ratio_base=self._train.ratio_base,
        )
        return BatchLoss(tokens=tokens, terms=terms)

    def _tokens(
        self, work: Batch, logprobs: Tensor, reference_logprobs: Tensor | None, update: Update
    ) -> LossTokens:
        weights = token_weights(
            work.lengths,
            aggregation=self._train.loss_aggregation,
            total_tokens=update.total_tokens,
            total_sequences=update.total_sequences,
        )
        feels_kl = work.per_token([float(self._feels_kl(sequence)) for sequence in work.sequences])
        return LossTokens(
            logprobs=logprobs,
            start_logprobs=_start_logprobs(work, logprobs.detach()),
            rollout_logprobs=work.joined("rollout_logprobs"),
            advantages=work.per_token([sequence.advantage for sequence in work.sequences]),
            weights=weights,
            reference_logprobs=reference_logprobs,
            kl_weights=weights * feels_kl,
        )

    def _feels_kl(self, sequence: TrainSequence) -> bool:
        has_signal = sequence.advantage != 0 if sequence.has_signal is None else sequence.has_signal
        return self._train.kl_coef != 0 and (has_signal or self._train.kl_without_signal)


def batch_stats(work: Batch, loss: BatchLoss, scores: Scores, replay: RouteReplay | None) -> MicrobatchStats:
    """Return the sums over a batch's tokens, and of the routes compared since the batch before."""
    tokens, terms = loss.tokens, loss.terms
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


def merged(left: MicrobatchStats, right: MicrobatchStats) -> MicrobatchStats:
    """Add two sums; of ratios keep the larger."""
    summed = [name for name in MicrobatchStats.__struct_fields__ if name not in {"max_ratio", "by_version"}]
    fields: dict[str, Any] = {name: getattr(left, name) + getattr(right, name) for name in summed}
    return MicrobatchStats(
        **fields,
        max_ratio=max(left.max_ratio, right.max_ratio),
        by_version=merged_versions([left.by_version, right.by_version]),
    )


def _start_logprobs(work: Batch, current: Tensor) -> Tensor:
    """Return the log-probs at the start of the step, the current ones where none were given."""
    parts = torch.split(current, work.lengths.tolist())
    return torch.cat(
        [
            part if sequence.old_logprobs is None else torch.tensor(sequence.old_logprobs)
            for part, sequence in zip(parts, work.sequences, strict=True)
        ]
    )
