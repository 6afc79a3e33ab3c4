"""A character tokenizer and a tiny Qwen3: a language model that a CPU trains in seconds.

The tests build their models with it too, so that examples and tests speak about the same thing.
"""

from pathlib import Path
from typing import Any

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<unk>"

# Role headers are tokens of their own: prompts stay short, and short prompts are cheap.
ROLE_HEADERS = ["user\n", "assistant\n"]

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def char_tokenizer() -> Any:
    """Build a tokenizer with one token per printable ASCII character and newline.

    Returns:
        A `PreTrainedTokenizerFast` of vocabulary 102 with ChatML as its chat template.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - seconds to import

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_characters(),
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_qwen3(
    vocab_size: int, *, hidden: int = 128, layers: int = 4, seed: int = 0, init_range: float = 0.08
) -> Any:
    """Build a Qwen3 with random float32 weights and heads of 32 dimensions.

    Args:
        vocab_size: rows of the tied embedding.
        hidden: width, a multiple of 32.
        layers: depth.
        seed: of the weights.
        init_range: standard deviation of the weights; the usual 0.02 learns later at this width.

    Returns:
        A `Qwen3ForCausalLM`.
    """
    import torch  # noqa: PLC0415 - seconds to import
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - the same

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocab_size,
                hidden_size=hidden,
                intermediate_size=3 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=hidden // 32,
                num_key_value_heads=hidden // 32,
                head_dim=32,
                max_position_embeddings=512,
                rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
                initializer_range=init_range,
                tie_word_embeddings=True,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face model folder: config, safetensors, tokenizer."""
    from transformers.utils import logging  # noqa: PLC0415 - loaded by now

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _characters() -> Any:
    from tokenizers import (  # noqa: PLC0415 - keeps `--help` light
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = [PAD, START, END, UNKNOWN, *characters]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    # Oniguruma: `(?m:.)` is "any character, newline included"; its `(?s)` is another thing.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in (PAD, START, END)]
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ROLE_HEADERS])
    return tokenizer
