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
    config = _json_object(folder / "config.json")
    text_config = config.get("text_config") or {}
    if not isinstance(text_config, dict):
        raise ValueError("config.json: `text_config` is not an object")  # noqa: TRY004 - as below
    return {**config, **text_config}


def takes_images(folder: Path) -> bool:
    """Say whether the model is one of those that see.

    Raises:
        ValueError: as `model_config`.
    """
    return "vision_config" in model_config(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder.

    Raises:
        ValueError: there are none, or one the index names is missing, or the index is none.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError("has no *.safetensors")
        return found
    shards = _json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{index.name} has no `weight_map` of file names")
    files = sorted({folder / name for name in shards.values()})
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}, which {index.name} names")
    return files


def model_shape(folder: Path) -> ModelShape:
    """Return a model's size.

    Raises:
        ValueError: the folder is not a whole model; the text says what is wrong.
    """
    config = model_config(folder)
    heads = max(1, _number(config, "num_attention_heads"))
    head_dim = _number(config, "head_dim") or _number(config, "hidden_size") // heads
    layers = _number(config, "num_hidden_layers")
    return ModelShape(
        parameters=sum(_parameters(file) for file in weight_files(folder)),
        layers=layers,
        kv_values_per_token=2 * layers * (_number(config, "num_key_value_heads") or heads) * head_dim,
        context_tokens=_number(config, "max_position_embeddings"),
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")  # noqa: TRY004 - the file is wrong, not a type
    return content


def _number(config: dict[str, Any], key: str) -> int:
    """Return a whole number; 0 where the model does not say."""
    value = config.get(key)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise ValueError(f"config.json: `{key}` is no whole number: {value!r:.60}")
    return value


def _parameters(file: Path) -> int:
    """Count the numbers in a safetensors file: 8 bytes of header length, a JSON header, the tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, 100_000_000)))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        parameters: int = sum(math.prod(tensor["shape"]) for tensor in tensors)
    except OSError as error:
        raise ValueError(f"{file.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ValueError(f"{file.name} is not a whole safetensors file") from None
    if file.stat().st_size < end:
        raise ValueError(f"{file.name} is not a whole safetensors file: it ends before its last tensor")
    return parameters
