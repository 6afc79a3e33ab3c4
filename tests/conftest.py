"""Fixtures of every test folder: a language model that is real, tiny and untrained."""

import importlib.util
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from left_behind import LeftBehind
from sglang_site import demand_sglang

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the tests may look for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes says nothing where other processes share the cores.
settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("RELAX_ACTOR_EXAMPLES", "100")),
)
settings.load_profile("suite")

CHAR_MODEL = Path(__file__).parents[1] / "examples" / "spell_backward" / "char_model.py"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sglang"):
        demand_sglang()


@pytest.fixture(scope="module")
def nothing_is_left_behind(tmp_path_factory):
    """Fail where processes, temporary files or files in shared memory of a module's servers are left (I8)."""
    tmp_path_factory.getbasetemp()  # pytest's own temporary files are elsewhere
    left_behind = LeftBehind()
    yield
    left = left_behind.close()
    assert not left, left


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A Hugging Face folder with a random Qwen3 (2 layers, hidden 64, float32), and prompts for it."""

    path: Path
    vocab_size: int
    folder: Path

    def rows(self, n: int) -> Path:
        """Write a JSONL file of `n` rows `{"prompt": "reverse WORD", "label": "DROW"}`, all different."""
        path = self.folder / f"rows-{n}.jsonl"
        if not path.exists():  # it may be read by a run that goes on
            path.write_text("".join(json.dumps(row) + "\n" for row in itertools.islice(_rows(), n)))
        return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Build a character tokenizer and a tiny Qwen3 once a session; nobody may change its files."""
    char_model = _char_model()
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = char_model.char_tokenizer()
    model = char_model.tiny_qwen3(len(tokenizer), hidden=64, layers=2, seed=0)
    char_model.save(folder / "model", model, tokenizer)
    return TinyModel(path=folder / "model", vocab_size=len(tokenizer), folder=folder)


def _rows():
    for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4):
        word = "".join(reversed(letters))  # the first letter changes fastest
        yield {"prompt": f"reverse {word}", "label": word[::-1]}


def _char_model() -> ModuleType:
    """Import the example's model builder by path: example folders are not packages."""
    spec = importlib.util.spec_from_file_location("relax_actor_char_model", CHAR_MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
