"""A vision language model as a function from token ids and images to logits, for rollout and trainer alike.

Both mask the same ids and pad in the same way, so that their log-probs agree. Nothing is cached: every call
computes the whole text and all its images, which is right for short answers about small images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_actor.engines.base import PLACEHOLDER_IDS

Media = Mapping[str, npt.NDArray[np.number]]


class VisionModel:
    """Runs a model of `AutoModelForImageTextToText`.

    Args:
        model: takes `pixel_values`, `image_grid_thw` and `mm_token_type_ids`, as Qwen3-VL.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.forbidden_token_ids = forbidden_token_ids(model.config)
        self._forbidden = torch.tensor(self.forbidden_token_ids, device=model.device)

    def logits(self, texts: Sequence[Sequence[int]], media: Sequence[Media | None]) -> Tensor:
        """Return logits after every token, -inf at ids that stand for images or padding.

        Args:
            texts: n, of any lengths; none empty.
            media: n; the arrays that the placeholders of each text stand for.

        Returns:
            [n, longest text, vocabulary], in the model's dtype; nothing to use after a text's end.
        """
        ids, mask = _padded(texts)
        logits: Tensor = self._model(
            input_ids=ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            mm_token_type_ids=(ids == self._model.config.image_token_id).long().to(self._model.device),
            use_cache=False,
            **self._arrays(media),
        ).logits
        return logits.index_fill(-1, self._forbidden, -torch.inf)

    def image_tokens(self, media: Media | None) -> int:
        """Return how many placeholder tokens the images of a prompt take.

        Raises:
            ValueError: other arrays than the model takes, or another number of patches than the grid has.
        """
        if not media:
            return 0
        if set(media) != {"pixel_values", "image_grid_thw"}:
            raise ValueError(f"media are {sorted(media)}, not `image_grid_thw` and `pixel_values`")
        patches = int(np.prod(media["image_grid_thw"], axis=-1, dtype=np.int64).sum())
        if len(media["pixel_values"]) != patches:
            raise ValueError(f"{len(media['pixel_values'])} patches for a grid of {patches}")
        return patches // int(self._model.config.vision_config.spatial_merge_size) ** 2

    def _arrays(self, media: Sequence[Media | None]) -> dict[str, Tensor]:
        """Lay the arrays of all texts end to end."""
        present = [each for each in media if each]
        joined = {name: np.concatenate([each[name] for each in present]) for name in (present or [{}])[0]}
        tensors = {name: torch.from_numpy(array).to(self._model.device) for name, array in joined.items()}
        return {
            name: value.to(self._model.dtype) if value.is_floating_point() else value
            for name, value in tensors.items()
        }


def forbidden_token_ids(config: Any) -> list[int]:
    """Return the ids that may only be in prompts: placeholders of images and videos, and padding."""
    found = [getattr(config, name, None) for name in PLACEHOLDER_IDS]
    return sorted({each for each in [*found, config.get_text_config().pad_token_id] if each is not None})


def _padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pad on the right; return ids and mask, int64 [n, longest]."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return ids, mask
