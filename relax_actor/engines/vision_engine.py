"""Sampling from vision language models: prompts with images, short answers.

Every decode step computes the whole text and its images again. That is right for answers of a few tokens
about small images, and needs neither a cache nor positions of its own; long answers want an engine with one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from relax_actor.engines.base import Request
from relax_actor.engines.decoder import Network, WeightLoader, build_model
from relax_actor.engines.errors import RequestError
from relax_actor.engines.running import RunningSample
from relax_actor.engines.transformers_engine import BatchingEngine
from relax_actor.vision import VisionModel


class VisionEngine(BatchingEngine):
    """Samples from a model with `vision_config`; see `relax_actor.engines.base.Engine`.

    It starts with random weights and no version. Ids that stand for images or padding are never sampled.

    Args:
        model_folder: a Hugging Face model folder; config.json is enough.
        seed: the run's, the same on all replicas.
        slots: how many samples are decoded at once.
        dtype: what it computes in, `float32` or `bfloat16`.
        deterministic: compute every sample alone, so that its bits are the same beside any others.
        threads: torch's, of the whole process.
        device: a torch device.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        seed: int,
        slots: int,
        dtype: str,
        deterministic: bool = False,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        self._vision = VisionNetwork(model_folder, dtype=dtype, device=device)
        batching = RecomputingBatching(self._vision, alone=deterministic)
        super().__init__(self._vision, batching, seed=seed, slots=slots)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, all or none; see the protocol.

        Raises:
            RequestError: also where images and their placeholders do not match.
        """
        for request in requests:
            self._vision.check_images(request)
        super().submit(requests)


class VisionNetwork(Network):
    """The policy's network with uninitialised weights, on one device, never trained here.

    Args:
        model_folder: holds config.json.
        dtype: `float32`, `bfloat16`, ...
        device: where it computes.
    """

    def __init__(self, model_folder: Path, *, dtype: str, device: str) -> None:
        config = AutoConfig.from_pretrained(model_folder)
        auto = AutoModelForImageTextToText
        model = build_model(auto, model_folder, config, getattr(torch, dtype), dummy_weights=True)
        model = model.to(device).eval().requires_grad_(requires_grad=False)
        self._loader = WeightLoader(model, dummy_weights=True)
        self._model = VisionModel(model)
        self._image_token_id: int = config.image_token_id
        text = config.get_text_config()
        self.vocabulary: int = text.vocab_size
        self.context_tokens: int = text.max_position_embeddings

    def check_images(self, request: Request) -> None:
        """Refuse a prompt whose placeholders are not those of its images.

        Raises:
            RequestError: it is so.
        """
        there = request.prompt.count(self._image_token_id)
        try:
            wanted = self._model.image_tokens(request.media)
        except ValueError as error:
            raise RequestError(request.key, str(error)) from error
        if there != wanted:
            raise RequestError(request.key, f"{there} image tokens in the prompt for images of {wanted}")

    def next_logits(self, samples: Sequence[RunningSample]) -> Tensor:
        """Return the logits after each sample's last token, [n, vocabulary]."""
        texts = [[*sample.request.prompt, *sample.tokens] for sample in samples]
        logits = self._model.logits(texts, [sample.request.media for sample in samples])
        return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


class RecomputingBatching:
    """Samples computed from their first token in every step.

    Args:
        network: what computes.
        alone: one sample at a time, instead of all in one batch.
    """

    def __init__(self, network: VisionNetwork, *, alone: bool) -> None:
        self._network, self._alone = network, alone
        self._running: list[RunningSample] = []

    @property
    def samples(self) -> list[RunningSample]:
        """The samples in flight."""
        return list(self._running)

    def next_logits(self, joining: Sequence[RunningSample]) -> Iterator[tuple[list[RunningSample], Tensor]]:
        """Take new samples and yield the next logits of all."""
        self._running += joining
        together = self.samples
        for batch in [[sample] for sample in together] if self._alone else [together] if together else []:
            yield batch, self._network.next_logits(batch)

    def remove(self, leaving: Sequence[RunningSample]) -> None:
        """Forget samples."""
        gone = {id(sample) for sample in leaving}
        self._running = [sample for sample in self._running if id(sample) not in gone]

    def routes(self, sample: RunningSample) -> None:
        """Experts are not recorded."""

    def weights_changed(self) -> None:
        """Nothing is kept from step to step."""

    def drop_cache(self) -> None:
        """There is none."""
