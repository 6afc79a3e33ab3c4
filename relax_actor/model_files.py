"""The files of a Hugging Face model folder: those that are not weights, and the names of those that are."""

import json
import shutil
import struct
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json", "*.gguf", "*.pt")
_ROW_FILES = ("*.jsonl",)  # prompts, where somebody keeps them beside the model


def side_files(folder: Path) -> list[Path]:
    """Return the files that belong beside the weights, sorted."""
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted(path for path in files if not any(map(path.match, _WEIGHT_FILES + _ROW_FILES)))


def copy_side_files(origin: Path, target: Path) -> None:
    """Copy every one of them that the target has not yet."""
    for path in side_files(origin):
        if not (target / path.name).exists():
            shutil.copy(path, target / path.name)


def weight_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in a folder's safetensors files; none where it has no such files.

    Source:
        https://github.com/huggingface/safetensors: eight bytes of length, then a JSON object by name.
    """
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            names.update(json.loads(file.read(length)))
    return frozenset(names - {"__metadata__"})
