"""A run of the loop with SGLang that is looked at while it goes on."""

import argparse
import json
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from common import spread
from sglang_scenes import server_options

from relax_actor import app
from relax_actor.config import Config
from relax_actor.supervision.spec import Backoff
from relax_actor.telemetry import read_events

ROOT = Path(__file__).resolve().parents[2]
LEAST_STEPS = 24
TELL_S = 5.0
ON_GPU = torch.cuda.is_available()


class Killer(Protocol):
    """Looks at a run now and then, and kills in it; see `sglang_kills` and `sglang_turns`."""

    kills: list[dict[str, Any]]

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be killed any more, and everybody is active again."""

    def look(self) -> None:
        """Kill, if it is time."""


class Run:
    """One run, and what is looked at of it while it goes on."""

    def __init__(
        self,
        folder: Path,
        args: argparse.Namespace,
        name: str,
        *,
        replicas: int,
        spares: int,
        **sections: Any,
    ) -> None:
        self.folder, self.replicas = folder / name, replicas
        self.servers = replicas + spares if spares else 0
        self.folder.mkdir()
        self.args, self.control = args, app.RunControl()
        self.config = config_of(folder, self.folder, args.chunk_tokens, (replicas, spares), sections)
        self._read, self._events, self._told = 0, [], 0

    def go(self, killer: Killer, *, to_the_end: bool = False) -> None:
        """Run until all kills are done and recovered from, and the steps are."""
        deadline = time.monotonic() + self.args.limit_s

        def tick() -> None:
            killer.look()
            self._tell(len(killer.kills))
            if time.monotonic() > deadline:
                self.control.kill("the benchmark's time is over")
            elif not to_the_end and killer.is_done and self.steps() >= LEAST_STEPS:
                self.control.stop("all is measured")

        self.kills = killer.kills
        self.outcome = app.run(
            self.config,
            self.folder,
            run_id=secrets.token_hex(4),
            control=self.control,
            on_tick=tick,
            env={"REWARD_LOG": str(self.folder / "samples.jsonl"), "OMP_NUM_THREADS": "1"},
            backoff=Backoff(base_s=0.02, cap_s=0.1),
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has happened so far."""
        path = self.folder / "events.jsonl"
        if path.exists():
            events, self._read = read_events(path, self._read)
            self._events += events
        return self._events

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            event
            for event in self.events
            if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items())
        ]

    def _tell(self, kills: int) -> None:
        """Say how far it is, now and then."""
        if time.monotonic() > self._told + TELL_S:
            self._told = time.monotonic()
            servers = len(self.of("engine_started"))
            said = f"{self.folder.name}: {self.steps()} steps, {servers} servers started, {kills} kills"
            print(said, file=sys.stderr, flush=True)

    def steps(self) -> int:
        return max((event["step"] for event in self.of("step")), default=0)

    def samples(self) -> dict[str, str]:
        """Return every sample that was scored, by group and index."""
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        return {each["key"]: each["response"] for each in map(json.loads, lines)}

    def summary(self) -> dict[str, Any]:
        """Return what the run came to."""
        steps, ledger = self.of("step"), self.of("ledger")
        trained = [group for event in steps for group in event["groups"]]
        rewards = [event["reward_mean"] for event in steps if event.get("reward_mean") is not None]
        return {
            "outcome": self.outcome.reason,
            "exit_code": self.outcome.exit_code,
            "steps": len(steps),
            "steps_in_order": [event["step"] for event in steps] == list(range(1, len(steps) + 1)),
            "trainer_pids": len({event["pid"] for event in steps}),
            "prompts_trained_twice": len(trained) - len(set(trained)),
            "ledger_balances": all(event["balances"] for event in ledger),
            "dropped_samples": sum(event["samples"] for event in self.of("group_dropped")),
            "kills": len(self.kills),
            "reward_first_and_last_steps": [mean(rewards[:5]), mean(rewards[-5:])],
            "installs_s": spread([event["seconds"] for event in self.of("policy_installed")] or [0.0]),
            "install_routes": sorted({event["route"] for event in self.of("policy_installed")}),
            "update_modes": sorted({event["mode"] for event in self.of("engine_updated")}),
            "weights_xxh3": self.weights(),
        }

    def weights(self) -> str:
        """Return a digest of the newest checkpoint's weights; empty where there is none."""
        import xxhash  # noqa: PLC0415 - for this only

        files = sorted(self.folder.glob("checkpoints/*/model/model.safetensors"))
        return xxhash.xxh3_64_hexdigest(files[-1].read_bytes()) if files else ""

    def restarts(self) -> list[dict[str, Any]]:
        """Return what each kill led to, in seconds after it."""
        return [self._restart(kill) for kill in self.kills]

    def _restart(self, kill: dict[str, Any]) -> dict[str, Any]:
        name, incarnation, at = kill["actor"], kill["incarnation"] + 1, kill["m"]

        def after(kind: str, **fields: Any) -> float | None:
            found = [event for event in self.of(kind, **fields) if event["m"] >= at]
            return round(found[0]["m"] - at, 3) if found else None

        started = [
            event
            for event in self.of("engine_started")
            if (event["actor"], event["inc"]) == (name, incarnation)
        ]
        installed = [
            event
            for event in self.of("policy_installed")
            if (event["actor"], event["inc"]) == (name, incarnation)
        ]
        return {
            "kind": kill["kind"],
            "actor": name,
            "samples_under_way": kill["leased"],
            "told_gone_s": after("child_exited", child=name, incarnation=kill["incarnation"]),
            "process_s": after("child_spawned", child=name, incarnation=incarnation),
            "active_s": after("child_active", child=name, incarnation=incarnation),
            "server_start_s": started[0]["seconds"] if started else None,
            "server_phases": started[0]["phases"] if started else None,
            "weights_s": installed[0]["seconds"] if installed else None,
        }


def config_of(
    base: Path, folder: Path, chunk_tokens: int, counts: tuple[int, int], sections: dict[str, Any]
) -> Config:
    """Return the run's configuration: prompts of a few letters, and a reward for vowels."""
    rows = folder / "rows.jsonl"
    words = [f"{a}{b}{c}" for a in "bcdfghjklm" for b in "aeiou" for c in "npqrstvwxz"]
    rows.write_text("".join(json.dumps({"prompt": f"say {word} ", "label": word}) + "\n" for word in words))
    devices = (
        {"trainer": "cuda:0", "rollout": f"cuda:{min(1, torch.cuda.device_count() - 1)}"} if ON_GPU else {}
    )
    samples, groups = (8, 8) if ON_GPU else (4, 2)
    values: dict[str, dict[str, Any]] = {
        "run": {
            "steps": 400,
            "max_staleness": 2,
            "seed": 5,
            "user_path": str(ROOT / "tests" / "support"),
            "grace_s": 20.0,
        },
        "model": {"path": str(base / "model"), "dtype": "bfloat16" if ON_GPU else "float32"},
        "data": {"path": str(rows)},
        "rollout": server_options()
        | {
            "sglang_args": server_words(),
            "replicas": counts[0],
            "spares": counts[1],
            "samples_per_prompt": samples,
            "max_new_tokens": 384 if ON_GPU else 12,
            "max_in_flight": 32 if ON_GPU else 8,
            "mem_fraction": 0.85 if ON_GPU else 0.0,
            "device": devices.get("rollout", "cpu"),
            "chunk_tokens": chunk_tokens,
            "verify": ON_GPU,
        },
        "reward": {"function": "user_rewards:vowels", "workers": 4 if ON_GPU else 1},
        "train": {
            "device": devices.get("trainer", "cpu"),
            "global_batch_size": samples * groups,
            "micro_batch_size": samples * groups if ON_GPU else 4,
            "learning_rate": 2e-5,
            "keep_checkpoints": 1,
        },
        "queue": {"max_attempts": 100},
    }
    for name, fields in sections.items():
        values[name] |= fields
    return msgspec.convert(values, Config)


def server_words() -> tuple[str, ...]:
    """Return the words for servers; what one takes of a GPU that several share is fixed."""
    words: tuple[str, ...] = server_options()["sglang_args"]
    return (*words, "--max-total-tokens", "65536") if ON_GPU else words


def mean(values: list[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None
