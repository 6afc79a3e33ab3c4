"""What the zygotes of a run import before they fork, so that actors start with it: torch takes seconds."""

import json
from importlib.util import find_spec
from pathlib import Path

from relax_actor.config import Config

TORCH_MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "relax_actor.engines.transformers_engine",
    "relax_actor.trainers.torch_backend",
    "relax_actor.roles.prompts",
    "relax_actor.roles.reward",
    "relax_actor.roles.rollout",
    "relax_actor.roles.trainer",
)
"""What the zygote of the roles that use torch imports before it forks; nothing here touches a device."""


def zygotes(config: Config) -> dict[str, tuple[str, ...]]:
    """Return what each zygote imports: the torch one also the model's own code, where transformers has it."""
    server = ("relax_actor.roles.sglang_engine",) if config.rollout.engine == "sglang" else ()
    return {
        "default": ("relax_actor.roles.queue",),
        "torch": (*TORCH_MODULES, *server, *_model_code(Path(config.model.path))),
    }


def _model_code(folder: Path) -> tuple[str, ...]:
    model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
    if not model_type or find_spec(f"transformers.models.{model_type}") is None:
        return ()
    return (f"transformers.models.{model_type}.modeling_{model_type}",)
