"""What a Hugging Face model folder holds, read from its headers: no weights, no torch."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a memory estimate needs to know of a model."""

    parameters: int
    layers: int
    kv_values_per_token: int  # key and value numbers one token adds, over all layers
    context_tokens: int  # 0 where the model does not say


def model_config(folder: Path) -> dict[str, Any]:
    """Return config.json; that of the text model, where there are several.

    Raises:
        ValueError: it is missing or not a JSON object; the text says which.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"config.json: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("config.json is not a JSON object")  # noqa: TRY004 - the file is wrong, not a type
    return {**config, **config.get("text_config", {})}


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder.

    Raises:
        ValueError: there are none, or one the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError("has no *.safetensors")
        return found
    files = sorted({folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}, which {index.name} names")
    return files


def model_shape(folder: Path) -> ModelShape:
    """Return a model's size.

    Raises:
        ValueError: the folder is not a whole model.
    """
    config = model_config(folder)
    heads = config.get("num_attention_heads", 1)
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // max(1, heads)
    layers = config.get("num_hidden_layers", 0)
    return ModelShape(
        parameters=sum(_parameters(file) for file in weight_files(folder)),
        layers=layers,
        kv_values_per_token=2 * layers * (config.get("num_key_value_heads") or heads) * head_dim,
        context_tokens=config.get("max_position_embeddings") or 0,
    )


def _parameters(file: Path) -> int:
    """Count the numbers in a safetensors file: 8 bytes of header length, then a JSON header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, 100_000_000)))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file.name} is not a whole safetensors file") from None
