"""A vision language model as a function from sequences to log-probs, and the choice between it and text only.

Sequences are padded and computed whole, each with its own copy of the images: position ids of images do not
fit the trees of relax_actor.trainers.torch_policy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from relax_actor.trainers.base import TrainSequence
from relax_actor.trainers.torch_policy import Batch, Scores, TorchPolicy, check, load_model
from relax_actor.vision import VisionModel

MAX_SEQUENCES = 256
"""Sequences computed at once."""


class Policy(Protocol):
    """What the torch backend needs of a model."""

    model: Any

    def __init__(self, model: Any, *, temperature: float) -> None: ...

    def pack(self, sequences: Sequence[TrainSequence]) -> Sequence[Batch]:
        """Deal sequences to passes through the model, in the order given."""
        ...

    def score(self, work: Any) -> Scores:
        """Run the model over one of `pack`'s, with gradient where the caller's mode has it."""
        ...


def load_policy(folder: Path, *, dtype: torch.dtype, device: str, temperature: float) -> Policy:
    """Load a model folder for training, as what its config.json says it is.

    Raises:
        UnsupportedModelError: its log-probs would be wrong.
        OSError: the folder is no model folder.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if not hasattr(config, "vision_config"):
        return TorchPolicy(load_model(folder, dtype=dtype, device=device), temperature=temperature)
    return VisionPolicy(_load_vision_model(folder, dtype=dtype, device=device), temperature=temperature)


class VisionPolicy:
    """Scores sequences with images.

    Args:
        model: of `AutoModelForImageTextToText`.
        temperature: what rollouts divide logits by; 0 (greedy) counts as 1.
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        self.model = model
        self._vision = VisionModel(model)
        self._temperature = temperature or 1.0

    def pack(self, sequences: Sequence[TrainSequence]) -> list[Batch]:
        """Cut into batches, in the order given.

        Raises:
            ValueError: a prompt or response is empty, or a response and its log-probs differ in length.
        """
        for sequence in sequences:
            check(sequence)
        starts = range(0, len(sequences), MAX_SEQUENCES)
        return [Batch(sequences=tuple(sequences[start : start + MAX_SEQUENCES])) for start in starts]

    def score(self, work: Batch) -> Scores:
        """Run the model over a batch, with gradient where the caller's mode has it."""
        texts = [[*each.prompt.tolist(), *each.response[:-1].tolist()] for each in work.sequences]
        logits = self._vision.logits(texts, [each.media for each in work.sequences])
        rows = torch.cat([_predicting(logits[i], each) for i, each in enumerate(work.sequences)])
        logprobs = torch.log_softmax(rows.float() / self._temperature, dim=-1)
        targets = work.joined("response").long().to(logprobs.device)
        return Scores(
            logprobs=logprobs.gather(-1, targets[:, None])[:, 0].cpu(),
            entropies=torch.special.entr(logprobs.detach().exp()).sum(-1).cpu(),
        )


def _predicting(logits: Tensor, sequence: TrainSequence) -> Tensor:
    """Return the rows that predict the response, [response tokens, vocabulary]."""
    first = len(sequence.prompt) - 1
    return logits[first : first + len(sequence.response)]


def _load_vision_model(folder: Path, *, dtype: torch.dtype, device: str) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: nn.Module = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval().to(device=device, dtype=dtype)
