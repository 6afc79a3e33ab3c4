"""The files of a Hugging Face model folder that are not weights: configuration, tokenizer, templates."""

import shutil
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
