"""What the torch backend puts into a checkpoint folder.

`model/` (a Hugging Face folder with the tokenizer), `optimizer.safetensors` (float32 masters and
moments) and `trainer.json` (which model they are of, and how far the run has come).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn

from relax_actor.model_files import copy_side_files

_FORMAT = 1
_STATE_FILE = "trainer.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_MODEL_FOLDER = "model"


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """trainer.json."""

    format: int
    updates_done: int
    parameters: dict[str, "_Parameter"]


class _Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """What must agree for a parameter to be continued."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool


class SavedTraining(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds besides the model's weights."""

    updates_done: int
    optimizer: dict[str, Tensor]  # as MasterOptimizer.state


def write_checkpoint(
    folder: Path, model: Any, optimizer: Mapping[str, Tensor], *, updates_done: int, origin: Path
) -> None:
    """Write model, optimizer and schedule into an existing, empty folder.

    Args:
        folder: where to.
        model: a Hugging Face model.
        optimizer: from `MasterOptimizer.state`.
        updates_done: optimizer updates finished so far.
        origin: the model's own folder, whose tokenizer is copied.
    """
    model.save_pretrained(folder / _MODEL_FOLDER)
    copy_side_files(origin, folder / _MODEL_FOLDER)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.items()}
    safetensors.torch.save_file(tensors, folder / _OPTIMIZER_FILE)
    state = _State(format=_FORMAT, updates_done=updates_done, parameters=_described(model))
    (folder / _STATE_FILE).write_bytes(msgspec.json.encode(state))


def read_checkpoint(folder: Path, model: Any) -> SavedTraining:
    """Read weights into the model and return the rest.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the checkpoint is of another model, dtype or choice of frozen parameters.
    """
    for name in (_STATE_FILE, _OPTIMIZER_FILE, _MODEL_FOLDER):
        if not (folder / name).exists():
            raise FileNotFoundError(f"the checkpoint {folder} has no {name}")
    state = _read_state(folder / _STATE_FILE)
    _require_same(state.parameters, _described(model), folder)
    _read_weights(folder / _MODEL_FOLDER, model)
    return SavedTraining(
        updates_done=state.updates_done, optimizer=safetensors.torch.load_file(folder / _OPTIMIZER_FILE)
    )


def _read_state(path: Path) -> _State:
    state = msgspec.json.decode(path.read_bytes(), type=_State)  # a DecodeError is a ValueError
    if state.format != _FORMAT:
        raise ValueError(f"{path} has format {state.format}; this version reads {_FORMAT}")
    return state


def _described(model: nn.Module) -> dict[str, _Parameter]:
    return {
        name: _Parameter(shape=tuple(value.shape), dtype=str(value.dtype), trained=value.requires_grad)
        for name, value in model.named_parameters()
    }


def _require_same(saved: dict[str, _Parameter], ours: dict[str, _Parameter], folder: Path) -> None:
    for name in sorted(saved.keys() | ours.keys()):
        if saved.get(name) != ours.get(name):
            raise ValueError(
                f"the checkpoint {folder} is of another model: `{name}` is {saved.get(name)} there "
                f"and {ours.get(name)} here"
            )


@torch.no_grad()
def _read_weights(folder: Path, model: Any) -> None:
    saved = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    ours = dict(model.named_parameters())
    for name, value in saved.named_parameters():
        ours[name].copy_(value)
