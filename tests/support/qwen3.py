"""Qwen3 by its sizes: the names and shapes of its weights as model files have them, and its config.json."""

from collections.abc import Iterator
from typing import Any, NamedTuple

VOCABULARY = 151_936


class Size(NamedTuple):
    """What one size of the model is made of."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = VOCABULARY


SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, head_dim=16, vocabulary=512),
    "0.6b": Size(1024, 3072, 28, 16, 8),
    "1.7b": Size(2048, 6144, 28, 16, 8),
    "4b": Size(2560, 9728, 36, 32, 8),
    "8b": Size(4096, 12288, 36, 32, 8),
}


def shapes(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every weight's name and shape; embeddings are tied."""
    hidden, inner, layers, heads, kv_heads, head, vocabulary = size
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.self_attn.k_norm.weight", (head,)
        yield f"{at}.self_attn.q_proj.weight", (heads * head, hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv_heads * head, hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv_heads * head, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)


def config(size: Size) -> dict[str, Any]:
    """Return config.json of a model in bfloat16."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.inner,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
