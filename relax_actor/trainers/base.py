"""What a trainer actor needs of a training backend."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.rl.apart import Mismatch

if TYPE_CHECKING:
    from torch import Tensor


class TrainSequence(msgspec.Struct, kw_only=True):
    """One sample, ready for the loss."""

    prompt: npt.NDArray[np.int32]  # [p]
    response: npt.NDArray[np.int32]  # [n], the stop token included; every one is trained on
    rollout_logprobs: npt.NDArray[np.float32]  # [n], as sampled
    advantage: float  # finite
    old_logprobs: npt.NDArray[np.float32] | None = None
    """[n], the trainer's own at the start of the step; None: those of the weights at hand."""
    has_signal: bool | None = None
    """Whether the rewards of its group differ; None: whether `advantage` is not 0."""
    media: Mapping[str, npt.NDArray[np.number]] | None = None
    """What the prompt's placeholder tokens stand for, by the names of the model's arguments."""
    key: tuple[int, int] = (-1, -1)
    """Group and sample index, for errors."""
    versions: npt.NDArray[np.int32] | None = None
    """[n], the policy version that sampled each token; None: not known."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """[p + n - 1, MoE layers, top_k], packed as in `relax_actor.rl.routing`."""


class MicrobatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the response tokens of one micro-batch; divide by `tokens` for means."""

    tokens: int
    loss: float  # already normalised: the losses of a step's micro-batches add up to the step's loss
    clipped_tokens: int
    kl_sum: float  # k3 estimate against the reference; 0 when kl_coef is 0
    mismatch_abs_sum: float  # |trainer log-prob - rollout log-prob|
    mismatch_k3_sum: float  # k3 estimate of KL(rollout || trainer)
    max_ratio: float
    entropy_sum: float = 0.0  # of the next token, in nats, at the temperature of rollouts
    by_version: Mapping[int, Mismatch] = {}  # the mismatch of the tokens that each policy version sampled
    routed_places: int = 0  # tokens times layers whose experts were compared
    routed_apart: int = 0  # of those, how many have other experts in the trainer


class UpdateStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer update did."""

    grad_norm: float
    learning_rate: float
    skipped: str = ""  # why the update was not applied: "no signal", "gradient is not finite"
    loss_factor: float = 1.0  # of the losses of its micro-batches, where its sizes were estimated


class TrainerBackend(Protocol):
    """Owns the trained weights, the optimizer and their checkpoint."""

    def begin_update(self, *, total_tokens: int, total_sequences: int, is_estimate: bool = False) -> None:
        """Start one optimizer update; one that has begun and was not finished is forgotten.

        Args:
            total_tokens: response tokens over all micro-batches of this update; the divisor of `token_mean`.
            total_sequences: sequences over all micro-batches; the divisor of `sequence_mean`.
            is_estimate: whether the sizes are not known yet. `finish_update` then puts the gradient right.
        """
        ...

    def accumulate(self, microbatch: Sequence[TrainSequence]) -> MicrobatchStats:
        """Forward and backward; any split into micro-batches gives the same gradient."""
        ...

    def finish_update(self) -> UpdateStats:
        """Clip, check that the gradient is finite, step, advance the learning rate."""
        ...

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Return each response token's log-prob under the current weights, [n] each, natural log."""
        ...

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield every parameter under its Hugging Face name, in the rollout's dtype, always in one order."""
        ...

    def offload(self) -> None:
        """Free the GPU's memory, between two updates; weights can be read and saved from where they are."""
        ...

    def onload(self) -> None:
        """Take it back."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into an existing, empty folder."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; training continues bit for bit.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the checkpoint is of another model or optimizer.
        """
        ...
