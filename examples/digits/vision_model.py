"""A word tokenizer and a Qwen3-VL of 0.41 M parameters, and handwritten digits as it takes them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WORDS = [
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "user",
    "assistant",
    "?",
    *"0123456789",
]
PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO = range(7)

PROMPT = (
    "<|im_start|> user <|vision_start|> "
    + "<|image_pad|> " * 4
    + "<|vision_end|> ? <|im_end|> <|im_start|> assistant"
)
GRID = [[1, 4, 4]]  # time, rows and columns of patches
PATCH = 4  # pixels


def word_tokenizer() -> Any:
    """Build a tokenizer of the words above, which spaces part."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - keeps `--help` light
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - the same

    words = {word: index for index, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))  # noqa: S106 - no password
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=WORDS[PAD], bos_token=WORDS[START], eos_token=WORDS[END]
    )


def tiny_qwen3_vl(*, hidden: int = 64, seed: int = 0) -> Any:
    """Build a Qwen3-VL with random float32 weights, two layers for images and two for text.

    Args:
        hidden: width, a multiple of 16.
        seed: of the weights.
    """
    import torch  # noqa: PLC0415 - seconds to import
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: PLC0415 - the same

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                text_config=_text_config(hidden),
                vision_config=_vision_config(hidden),
                image_token_id=IMAGE,
                video_token_id=VIDEO,
                vision_start_token_id=VISION_START,
                vision_end_token_id=VISION_END,
                tie_word_embeddings=True,
            )
        )


def patches(image: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Cut a picture into what the model takes.

    Args:
        image: [8, 8], 0 (white) to 16.

    Returns:
        float32 [16 patches, 96]: twice as large, in three colours, twice in time, in 4x4 pixels; the four
        patches that become one token follow one another.
    """
    large = (image.repeat(2, axis=0).repeat(2, axis=1) / 16 - 0.3) / 0.4
    video = np.broadcast_to(large, (2, 3, 16, 16)).reshape(1, 2, 3, 2, 2, PATCH, 2, 2, PATCH)
    return video.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(16, 96).astype(np.float32)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face model folder: config, safetensors, tokenizer."""
    from transformers.utils import logging  # noqa: PLC0415 - loaded by now

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _text_config(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": len(WORDS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 16,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 128,
        "pad_token_id": PAD,
        "bos_token_id": START,
        "eos_token_id": END,
        "initializer_range": 0.08,
        "tie_word_embeddings": True,
    }


def _vision_config(hidden: int) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": hidden,
        "out_hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": hidden // 16,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.08,
    }
