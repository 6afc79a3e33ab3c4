"""How running samples share the decoder: together in one batch, or each alone.

Both prefill prompts that join, keep the samples' keys and values, and yield next-token logits. Prompts that
several samples share are prefilled once in either.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_actor.engines.decoder import Decoder
from relax_actor.engines.kv_cache import SlotCache, Window
from relax_actor.engines.prefill import common_prefix, distinct, prefill_batches
from relax_actor.engines.running import RunningSample

_WORTH_A_FORWARD_TOKENS = 32  # a pass over the weights costs about as much as this many tokens on a CPU

Prompt = tuple[int, ...]


class Batching(Protocol):
    """Which samples run together."""

    @property
    def samples(self) -> Sequence[RunningSample]:
        """The samples that have been admitted and not removed."""
        ...

    def next_logits(self, joining: Sequence[RunningSample]) -> Iterator[tuple[list[RunningSample], Tensor]]:
        """Yield samples and their next-token logits, [n, vocabulary], until each had its turn.

        The caller appends a token to each before it asks for more.

        Args:
            joining: samples admitted by this call, with no tokens but those of their prefixes.
        """
        ...

    def remove(self, leaving: Sequence[RunningSample]) -> None:
        """Forget samples."""
        ...

    def routes(self, sample: RunningSample) -> npt.NDArray[np.int32] | None:
        """Return the experts of a sample's tokens but the last, [length - 1, layers, top_k].

        None where they are not recorded, or the sample has not been admitted.
        """
        ...

    def weights_changed(self) -> None:
        """Forget what later prompts would share; running samples keep their keys and values."""
        ...

    def drop_cache(self) -> None:
        """Free all keys and values, of which no running sample has any."""
        ...


class TogetherBatching:
    """All samples in one batch; prompts that begin alike share the prefill of their common prefix.

    Sample i is in row i of the cache, without gaps, so a decode step sees a view of it. One further row
    holds the newest prompt, whose beginning the next ones may share.
    """

    def __init__(self, decoder: Decoder, slots: int) -> None:
        self.samples: list[RunningSample] = []
        self._decoder = decoder
        self._cache = decoder.new_cache(rows=slots + 1)
        self._prefix_row = slots
        self._prefix: Prompt = ()

    def next_logits(self, joining: Sequence[RunningSample]) -> Iterator[tuple[list[RunningSample], Tensor]]:
        """Yield the running samples, then those that join."""
        if self.samples:
            yield list(self.samples), self._decode()
        if joining:
            yield self._prefill(joining)

    def remove(self, leaving: Sequence[RunningSample]) -> None:
        """Close the gaps with samples from the end."""
        gone = {id(sample) for sample in leaving}
        staying = len(self.samples) - len(gone)
        holes = [row for row in range(staying) if id(self.samples[row]) in gone]
        movers = [row for row in range(staying, len(self.samples)) if id(self.samples[row]) not in gone]
        length = max((self.samples[row].length - 1 for row in movers), default=0)  # the last is not fed yet
        self._cache.copy(self._cache, movers, holes, length)
        for hole, mover in zip(holes, movers, strict=True):
            self.samples[hole] = self.samples[mover]
        del self.samples[staying:]

    def routes(self, sample: RunningSample) -> npt.NDArray[np.int32] | None:
        """Read a sample's row."""
        row = next((row for row, each in enumerate(self.samples) if each is sample), None)
        return None if row is None else _routes(self._cache, row, sample)

    def weights_changed(self) -> None:
        """Forget the shared prefix."""
        self._prefix = ()

    def drop_cache(self) -> None:
        """Free the cache of all rows."""
        self._cache.drop()

    def _decode(self) -> Tensor:
        """Feed every sample's last token."""
        device = self._decoder.device
        tokens = torch.tensor([[sample.tokens[-1]] for sample in self.samples], device=device)
        positions = torch.tensor([[sample.length - 1] for sample in self.samples], device=device)
        window = Window(first_row=0, positions=positions)
        return self._decoder.forward(self._cache, window, tokens, torch.zeros_like(tokens[:, 0]))

    def _prefill(self, joining: Sequence[RunningSample]) -> tuple[list[RunningSample], Tensor]:
        """Fill the rows after the running ones: first one a prompt, then copies for its other samples."""
        prompts, first, others = distinct(joining)
        start = len(self.samples)
        rows = {prompt: start + i for i, prompt in enumerate(prompts)}
        logits = self._prefill_prompts(prompts, start)
        self.samples += first + others
        copies = list(range(start + len(first), len(self.samples)))
        sources = [rows[sample.text] for sample in others]
        longest = max((sample.length for sample in others), default=0)
        self._cache.copy(self._cache, sources, copies, longest)
        index = [rows[sample.text] - start for sample in first + others]
        return first + others, logits[torch.tensor(index)]

    def _prefill_prompts(self, prompts: Sequence[Prompt], start: int) -> Tensor:
        """Fill consecutive rows with prompts, shortest first; return [prompts, vocabulary] logits."""
        shared = self._share_prefix(prompts)
        rows = range(start, start + len(prompts))
        self._cache.copy(self._cache, [self._prefix_row] * len(prompts), rows, shared)
        logits = [
            self._forward(rows[part.start], shared, [prompt[shared:] for prompt in prompts[part]])
            for part in prefill_batches([len(prompt) - shared for prompt in prompts])
        ]
        self._cache.copy(self._cache, rows[-1:], [self._prefix_row], len(prompts[-1]))
        self._prefix = prompts[-1]
        return torch.cat(logits)

    def _share_prefix(self, prompts: Sequence[Prompt]) -> int:
        """Return how many first positions of all prompts the prefix row holds; extend it if that pays."""
        common = common_prefix(prompts)[: len(prompts[0]) - 1]  # the last token's logits are needed
        known = len(common_prefix([common, self._prefix]))
        more = common[known:]
        if len(more) * (len(prompts) - 1) < _WORTH_A_FORWARD_TOKENS:
            return known
        self._forward(self._prefix_row, known, [more])
        return len(common)

    def _forward(self, first_row: int, start: int, texts: Sequence[Prompt]) -> Tensor:
        """Prefill consecutive rows from one position on, padded to the longest."""
        return _prefilled(self._decoder, self._cache, first_row, start, texts)


class AloneBatching:
    """Every sample in a batch and a cache of its own: its bits depend on nothing but itself.

    Tensor shapes, strides and alignment are functions of prompt and budget, because kernels choose their
    order of summation by them. For the same reason a prefix is fed token by token, as it was sampled: that
    costs a decode step a token, less the sampling.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._running: dict[int, tuple[RunningSample, SlotCache]] = {}

    @property
    def samples(self) -> list[RunningSample]:
        """The samples that have been admitted and not removed."""
        return [sample for sample, _ in self._running.values()]

    def next_logits(self, joining: Sequence[RunningSample]) -> Iterator[tuple[list[RunningSample], Tensor]]:
        """Yield one sample after the other."""
        for sample, cache in list(self._running.values()):
            text = (sample.tokens[-1],)
            yield [sample], _prefilled(self._decoder, cache, 0, sample.length - 1, [text])
        for prompt in dict.fromkeys(sample.request.prompt for sample in joining):
            yield from self._prefill(prompt, [s for s in joining if s.request.prompt == prompt])

    def remove(self, leaving: Sequence[RunningSample]) -> None:
        """Free their caches."""
        for sample in leaving:
            del self._running[id(sample)]

    def routes(self, sample: RunningSample) -> npt.NDArray[np.int32] | None:
        """Read a sample's own cache."""
        running = self._running.get(id(sample))
        return None if running is None else _routes(running[1], 0, sample)

    def weights_changed(self) -> None:
        """Nothing is kept for later prompts."""

    def drop_cache(self) -> None:
        """Caches have gone with their samples."""

    def _prefill(
        self, prompt: Prompt, samples: Sequence[RunningSample]
    ) -> Iterator[tuple[list[RunningSample], Tensor]]:
        """Compute a prompt once and give each of its samples a copy."""
        source = self._decoder.new_cache(rows=1, capacity_tokens=len(prompt))
        logits = _prefilled(self._decoder, source, 0, 0, [prompt])
        for sample in samples:
            capacity = len(prompt) + sample.budget_tokens
            cache = self._decoder.new_cache(rows=1, capacity_tokens=capacity)
            cache.copy(source, [0], [0], len(prompt))
            self._running[id(sample)] = (sample, cache)
            yield [sample], self._replayed(cache, sample, logits)

    def _replayed(self, cache: SlotCache, sample: RunningSample, logits: Tensor) -> Tensor:
        """Feed a prefix; return the logits after it, or those after the prompt where there is none."""
        for position, token in enumerate(sample.tokens, start=len(sample.request.prompt)):
            logits = _prefilled(self._decoder, cache, 0, position, [(token,)])
        return logits


def _routes(cache: SlotCache, row: int, sample: RunningSample) -> npt.NDArray[np.int32] | None:
    return None if cache.routes is None else cache.routes.read(row, sample.length - 1)


def _prefilled(
    decoder: Decoder, cache: SlotCache, first_row: int, start: int, texts: Sequence[Prompt]
) -> Tensor:
    """Write texts into consecutive rows from `start` on; return the logits after each, [n, vocabulary]."""
    lengths = torch.tensor([len(text) for text in texts], device=decoder.device)
    width = int(lengths.max())
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=decoder.device)
    # What padding writes lies after the row's length; it is overwritten before anything attends to it.
    positions = torch.arange(start, start + width, device=decoder.device).expand(len(texts), width)
    window = Window(first_row=first_row, positions=positions)
    return decoder.forward(cache, window, tokens, lengths - 1)
