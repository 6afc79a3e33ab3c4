"""Which of SGLang's model modules a server needs: the one with its model's class, by their sources.

SGLang imports all of them to see what each defines.
"""

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SKIPPED = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's variable, which is of modules, whatever its name says."""
OTHER = "SGLANG_EXTERNAL_MODEL_PACKAGE"
ALL_MODELS = ("--model-impl", "--speculative", "--json-model-override-args")
"""Words of the command line that may lead to another model class than the configuration's."""

_ENTRY = re.compile(r"^EntryClass\b[^=\n]*=\s*(\w+|[\[(][^\])]*[\])])", re.MULTILINE)


def entry_classes(source: str) -> tuple[str, ...]:
    """Return the classes that a model module offers, by its source."""
    return tuple(name for entry in _ENTRY.findall(source) for name in re.findall(r"\w+", entry))


def modules_to_skip(architecture: str, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that do not define a model class; none at all if it is found nowhere.

    Args:
        architecture: the class, or nothing.
        sources: of each module of `sglang.srt.models`, by its last name.
    """
    others = tuple(name for name, source in sources.items() if architecture not in entry_classes(source))
    return others if len(others) < len(sources) else ()


def skip_models(words: Sequence[str]) -> str:
    """Tell SGLang which model modules it need not import; return what was decided, in words."""
    if SKIPPED in os.environ or os.environ.get(OTHER):
        return "model modules as the environment says"
    sources = _model_sources()
    skipped = modules_to_skip(_architecture(words), sources)
    if not skipped:
        return "all model modules"
    os.environ[SKIPPED] = ",".join(skipped)
    return f"{len(sources) - len(skipped)} of {len(sources)} model modules"


def plain_architecture(config: Mapping[str, Any]) -> str:
    """Return the class of a plain language model, by its configuration; nothing for any other model.

    Others may be served by more classes than the one named, or by another.
    """
    architectures = config.get("architectures") or [""]
    plain = len(architectures) == 1 and architectures[0].endswith("ForCausalLM")
    return architectures[0] if plain and not {"vision_config", "quantization_config"} & set(config) else ""


def _architecture(words: Sequence[str]) -> str:
    if any(word.startswith(ALL_MODELS) for word in words):
        return ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        config = Path(words[words.index("--model-path") + 1], "config.json")
        return plain_architecture(json.loads(config.read_text(encoding="utf-8")))
    return ""


def _model_sources() -> dict[str, str]:
    spec = importlib.util.find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder, "srt", "models").glob("*.py")]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
