"""What the launcher's tests share: a model folder of headers only, a dataset, and event logs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actor.config import Config, DataConfig, ModelConfig


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model of 1,000 parameters, all of them 0."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [30, 30], "data_offsets": [0, 3600]},
        "b": {"dtype": "F32", "shape": [100], "data_offsets": [3600, 4000]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4000))
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "label": "{n + 1}"}}\n' for n in range(4)))
    return path


@pytest.fixture
def config(model_folder: Path, dataset: Path) -> Config:
    """A configuration in which nothing is wrong."""
    return Config(model=ModelConfig(path=str(model_folder)), data=DataConfig(path=str(dataset)))


@pytest.fixture
def log_of() -> Callable[..., None]:
    """Write events, one dict each, to a file; times count up from 1000 s where none is given."""

    def write(path: Path, *events: dict) -> None:
        with path.open("a") as file:
            for moment, event in enumerate(events):
                header = {"t": 1000.0 + moment, "actor": "head", "inc": 1, "pid": 1}
                file.write(json.dumps(header | event) + "\n")

    return write


STORY = (
    {"kind": "run_started", "run_id": "0011aabb", "mode": "async_off_policy", "max_staleness": 1, "steps": 4},
    {
        "kind": "child_spawned",
        "child": "rollout/0",
        "incarnation": 1,
        "pid": 71,
        "log": "logs/rollout-0-1.log",
    },
    {"kind": "child_ready", "child": "rollout/0", "incarnation": 1, "after_s": 1.0},
    {"kind": "child_active", "child": "rollout/0", "incarnation": 1, "policy_version": 0},
    {
        "kind": "step",
        "step": 1,
        "policy_version": 1,
        "reward_mean": 0.25,
        "loss": 0.5,
        "tokens_per_s": 1234.5,
        "train_s": 1.5,
        "wait_s": 0.5,
        "staleness": {"1": 32, "0": 96},
    },
    {"kind": "policy_published", "actor": "trainer", "version": 1, "step": 1, "seconds": 0.1, "nbytes": 8},
    {"kind": "policy_installed", "actor": "rollout/0", "version": 1, "seconds": 0.1},
    {"kind": "eval", "eval_set": "held", "policy_version": 1, "step": 1, "mean_reward": 0.5, "samples": 12},
    {
        "kind": "sample_dropped",
        "group_id": 3,
        "sample_index": 1,
        "origin": "d.jsonl:4",
        "reason": "reward is nan",
    },
    {"kind": "group_dropped", "group_id": 4, "origin": "d.jsonl:5", "reason": "too late"},
    {
        "kind": "ledger",
        "submitted": 9,
        "trained": 4,
        "dropped": 1,
        "running": 2,
        "queued": 2,
        "balances": True,
    },
    {"kind": "child_exited", "child": "rollout/0", "incarnation": 1, "pid": 71, "reason": "SIGKILL"},
    {"kind": "child_restarting", "child": "rollout/0", "incarnation": 1, "delay_s": 0.2, "reason": "SIGKILL"},
    {
        "kind": "child_spawned",
        "child": "rollout/0",
        "incarnation": 2,
        "pid": 72,
        "log": "logs/rollout-0-2.log",
    },
    {"kind": "trainer_waits", "reason": "no complete group"},
)


@pytest.fixture
def story() -> tuple[dict, ...]:
    """A short run in which a rollout is killed."""
    return STORY


class Clock:
    """Makes the events of one head, a second apart."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def add(self, kind: str, /, **fields) -> None:
        t = fields.pop("t", 1000.0 + len(self.events))
        self.events.append({"t": t, "actor": "head", "inc": 1, "pid": 1, "kind": kind, **fields})

    def start(self, *names: str, incarnation: int = 1, **fields) -> None:
        for name in names:
            log = f"logs/{name.replace('/', '-')}-{incarnation}.log"
            self.add("child_spawned", child=name, incarnation=incarnation, **{"pid": 70, "log": log} | fields)
            self.add("child_ready", child=name, incarnation=incarnation, after_s=0.5)

    def end(self, name: str, reason: str, exit_: str, incarnation: int = 1, **fields) -> None:
        line = f"{name} (incarnation {incarnation}, pid 70) died: {reason}"
        facts = {"child": name, "incarnation": incarnation, "reason": reason, "exit": exit_, "line": line}
        self.add("child_exited", **facts, **fields)


TREE = {
    "name": "run",
    "children": [
        {"name": "queue"},
        {"name": "pair", "children": [{"name": "left"}, {"name": "right"}]},
        {"name": "rollouts", "children": [{"name": "rollout/0"}, {"name": "rollout/1"}]},
    ],
}


@pytest.fixture
def happened() -> Clock:
    """Events to add to, beginning with a tree of two supervisors below the root."""
    clock = Clock()
    clock.add(
        "tree_started", run_id="0011aabb", host="here", start_ticks=1, shm_root="/shm", tree=TREE, pid=9
    )
    return clock
