"""A Hugging Face causal language model as a function from sequences to log-probs.

Sequences go through the model as trees (relax_actor.rl.packing), so a shared prompt costs one pass.
Logits exist only for rows that predict a response token, in float32 and a bounded number at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relax_actor.errors import RelaxError
from relax_actor.rl.packing import PackedTree, Step, pack_tree, pack_trees
from relax_actor.trainers.base import TrainSequence
from relax_actor.trainers.replay import PlacedRoutes, RouteReplay, steps

MAX_TREE_ROWS = 4096
"""Where attention between unrelated sequences begins to cost as much as all else."""

MAX_LOGITS = 2**25
"""Logits held at once: 128 MiB of float32."""


class UnsupportedModelError(RelaxError):
    """A model whose log-probs this backend would get wrong.

    Args:
        model: folder of the model.
        fact: what it does differently.
    """

    def __init__(self, model: str, fact: str) -> None:
        self.model, self.fact = model, fact
        super().__init__(
            f"the model in {model} {fact}\n\n"
            "hint: the torch backend takes decoders with full attention and a plain output layer, "
            "such as Llama, Qwen2 and Qwen3"
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences that go through a model together."""

    sequences: tuple[TrainSequence, ...]

    @property
    def lengths(self) -> Tensor:
        """Response tokens, int64 [sequences]."""
        return torch.tensor([len(sequence.response) for sequence in self.sequences])

    def per_token(self, values: Sequence[float]) -> Tensor:
        """Repeat a value of each sequence over its response: float32 [tokens]."""
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(self.lengths)

    def joined(self, field: str) -> Tensor:
        """Lay an array of every sequence end to end: [tokens], its dtype kept."""
        return torch.from_numpy(np.concatenate([getattr(sequence, field) for sequence in self.sequences]))


@dataclass(frozen=True, kw_only=True)
class Pack(Batch):
    """Sequences as one tree."""

    tree: PackedTree
    routes: PlacedRoutes | None = None  # where the rollout's are replayed

    def predicting_rows(self) -> Tensor:
        """Return the row from which each response token is predicted: int64 [tokens]."""
        return torch.cat(
            [
                path[len(sequence.prompt) - 1 :]
                for path, sequence in zip(self.tree.paths, self.sequences, strict=True)
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the model says about the response tokens of a batch, float32 [tokens] on the CPU."""

    logprobs: Tensor  # natural log of softmax(logits / temperature)
    entropies: Tensor  # of the whole distribution, in nats; carries no gradient


def pack(
    sequences: Sequence[TrainSequence], *, max_rows: int = MAX_TREE_ROWS, replay: RouteReplay | None = None
) -> list[Pack]:
    """Pack sequences into trees, in the order given.

    Args:
        sequences: those that share a prefix should be neighbours.
        max_rows: of one tree.
        replay: who takes their routed experts; None leaves them out.

    Raises:
        ValueError: a prompt or response is empty, or a response and its log-probs differ in length.
        RoutedExpertsError: with `replay`, if it cannot take those of a sequence.
    """
    for sequence in sequences:
        check(sequence)
        if replay is not None:
            replay.check(sequence)
    trees = pack_trees([_steps(sequence, replay) for sequence in sequences], max_rows=max_rows)
    remaining = iter(sequences)
    return [_pack(tree, tuple(next(remaining) for _ in tree.paths), replay) for tree in trees]


def load_model(folder: Path, *, dtype: torch.dtype, device: str) -> nn.Module:
    """Load a model folder for training and prove that trees are exact on it.

    Dropout is off: the trainer must see the distribution that was sampled from.

    Raises:
        UnsupportedModelError: see there.
        OSError: the folder is no model folder.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except ValueError as error:  # of another kind than causal language models, or without this attention
        raise UnsupportedModelError(str(folder), f"cannot be loaded: {error}") from error
    model.eval()
    _prove_exact(model, folder)
    return model.to(device=device, dtype=dtype)


class TorchPolicy:
    """Scores packs with a model.

    Args:
        model: from `load_model`.
        temperature: what rollouts divide logits by; 0 (greedy) counts as 1.
        max_logits: logits held at once.
    """

    def __init__(self, model: Any, *, temperature: float, max_logits: int = MAX_LOGITS) -> None:
        self.model = model
        self.replay: RouteReplay | None = None
        self._temperature = temperature or 1.0
        self._chunk_rows: int = max(1, max_logits // model.config.vocab_size)

    def pack(self, sequences: Sequence[TrainSequence]) -> list[Pack]:
        """Pack sequences into trees; see `pack`."""
        return pack(sequences, replay=self.replay)

    def score(self, work: Pack) -> Scores:
        """Run the model over a pack, with gradient where the caller's mode has it."""
        rows, token_row = torch.unique(work.predicting_rows(), return_inverse=True)
        hidden = self._hidden_states(work)[rows.to(_device(self.model))]
        targets = work.joined("response").long()
        parts = [
            self._score_rows(hidden[start : start + self._chunk_rows], start, token_row, targets)
            for start in range(0, len(rows), self._chunk_rows)
        ]
        order = torch.argsort(torch.cat([tokens for tokens, _, _ in parts]))
        return Scores(
            logprobs=torch.cat([logprobs for _, logprobs, _ in parts])[order],
            entropies=torch.cat([entropies for _, _, entropies in parts])[order],
        )

    def _hidden_states(self, work: Pack) -> Tensor:
        if self.replay is None or work.routes is None:
            return _hidden_states(self.model, work.tree)
        with self.replay.replaying(work.routes):
            hidden = _hidden_states(self.model, work.tree)
        self.replay.compare(work.tree, work.sequences, work.routes)
        return hidden

    def _score_rows(
        self, hidden: Tensor, start: int, token_row: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that these rows predict, their log-probs and entropies, on the CPU."""
        tokens = ((token_row >= start) & (token_row < start + len(hidden))).nonzero()[:, 0]
        row, target = token_row[tokens] - start, targets[tokens]
        is_whole = int(token_row.max()) < self._chunk_rows
        run = self._head if is_whole else _recomputed(self._head)
        logprobs, entropies = run(hidden, row.to(hidden.device), target.to(hidden.device))
        return tokens, logprobs.cpu(), entropies.cpu()

    def _head(self, hidden: Tensor, row: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = _output_layer(self.model)(hidden).float() / self._temperature
        normaliser = torch.logsumexp(logits, dim=-1)
        with torch.no_grad():
            expected = (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
            entropies = normaliser - expected
        return logits[row, target] - normaliser[row], entropies[row]


def _pack(tree: PackedTree, sequences: tuple[TrainSequence, ...], replay: RouteReplay | None) -> Pack:
    routes = None if replay is None else replay.place(tree, sequences)
    return Pack(sequences=sequences, tree=tree, routes=routes)


def _steps(sequence: TrainSequence, replay: RouteReplay | None) -> Sequence[Step]:
    inputs = _inputs(sequence)
    return inputs if replay is None else steps(sequence, inputs)


def _inputs(sequence: TrainSequence) -> list[int]:
    """Return what the model reads: the last token predicts nothing we train on."""
    return [*sequence.prompt.tolist(), *sequence.response[:-1].tolist()]


def check(sequence: TrainSequence) -> None:
    """Refuse a sequence without prompt or response, or whose log-probs are of another length.

    Raises:
        ValueError: it is so.
    """
    if not len(sequence.prompt) or not len(sequence.response):
        raise ValueError(
            f"a sequence of {len(sequence.prompt)} prompt and {len(sequence.response)} response tokens "
            "has nothing to predict from or nothing to predict"
        )
    for logprobs in (sequence.rollout_logprobs, sequence.old_logprobs):
        if logprobs is not None and len(logprobs) != len(sequence.response):
            raise ValueError(f"{len(logprobs)} log-probs for {len(sequence.response)} response tokens")


def _recomputed(head: Any) -> Any:
    """Let the backward pass compute the logits again instead of keeping those of every chunk."""
    return lambda *inputs: checkpoint(head, *inputs, use_reentrant=False)


def _hidden_states(model: Any, tree: PackedTree) -> Tensor:
    """Return the last hidden state of every row, [rows, hidden], in the model's dtype."""
    _require_within_window(model, tree)
    device, dtype = _device(model), model.dtype
    blocked = torch.finfo(dtype).min
    mask = torch.zeros((1, 1, tree.rows, tree.rows), dtype=dtype)
    mask.masked_fill_(~tree.ancestor_mask, blocked)
    hidden: Tensor = model.base_model(
        input_ids=tree.tokens[None].to(device),
        attention_mask=mask.to(device),
        position_ids=tree.positions[None].to(device),
        use_cache=False,
    ).last_hidden_state[0]
    return hidden


def _require_within_window(model: Any, tree: PackedTree) -> None:
    """Refuse what a sliding window would hide: our mask replaces the model's own.

    Raises:
        UnsupportedModelError: a sequence is longer than the window.
    """
    window = getattr(model.config, "sliding_window", None)
    depth = int(tree.positions.max()) + 1
    if window is not None and depth > window:
        fact = f"attends to its last {window} tokens only, and a sequence has {depth}"
        raise UnsupportedModelError(model.name_or_path, fact)


def _output_layer(model: Any) -> nn.Module:
    layer: nn.Module = model.get_output_embeddings()
    return layer


def _device(model: nn.Module) -> torch.device:
    return next(iter(chain(model.parameters(), model.buffers()))).device


@torch.no_grad()
def _prove_exact(model: Any, folder: Path) -> None:
    """Compare a small tree with the model's own forward pass over each of its sequences.

    A model that has recurrent layers, scales its logits or reads its mask differently fails here,
    in milliseconds, instead of training on wrong log-probs for hours.
    """
    for sequence, packed in zip(_probe(model), _probe_scores(model, folder), strict=True):
        alone = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
        tolerance = 1e-3 * alone.abs().max().item()
        if not torch.allclose(packed, alone, rtol=0.0, atol=tolerance):
            raise UnsupportedModelError(str(folder), "gives other logits when sequences share a prefix")


def _probe(model: Any) -> list[list[int]]:
    size = model.config.vocab_size
    a, b, c, d = ((size // 2 + offset) % size for offset in range(4))
    return [[a, b, c, d], [a, d, b], [b, a]]


def _probe_scores(model: Any, folder: Path) -> Iterator[Tensor]:
    tree = pack_tree(_probe(model))
    try:
        logits = _output_layer(model)(_hidden_states(model, tree))
    except Exception as error:
        raise UnsupportedModelError(str(folder), f"cannot run on a tree of tokens: {error}") from error
    return (logits[path] for path in tree.paths)
