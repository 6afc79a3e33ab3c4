"""RL with SGLang rollouts and the torch trainer on GPUs, under kills: what they cost, what is lost.

    RELAX_ACTOR_SGLANG_PYTHON=python3 python benchmarks/gpu/sglang_loop.py OUT.json [--parts storm,spare,same]

`storm`: three replicas on one GPU, a trainer on another; the server's scheduler, its main process and
our actor are killed in turn, three times each, while samples are under way. `spare`: one replica, and a
server that waits. `same` (I6): max_staleness 0 and deterministic servers; the samples of a run with three
kills are those of a run without. `experts`: a mixture of experts with and without routing replay (R3).
`colocate`: trainer and server take turns on one GPU. `--shape tiny` plays it on a CPU.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

import msgspec  # noqa: E402
import psutil  # noqa: E402
import sglang_turns  # noqa: E402
import torch  # noqa: E402
from common import commit, machine, spread  # noqa: E402
from sglang_scenes import model_folder, server_options  # noqa: E402

from relax_actor import app  # noqa: E402
from relax_actor.config import Config  # noqa: E402
from relax_actor.supervision.spec import Backoff  # noqa: E402
from relax_actor.telemetry import read_events  # noqa: E402

KINDS = ("scheduler", "main", "actor")
LEAST_STEPS = 24
TELL_S = 5.0
ON_GPU = torch.cuda.is_available()


def main() -> None:
    args = parsed()
    result: dict[str, Any] = {
        "benchmark": "gpu-sglang-loop",
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("BENCH_COMMIT") or commit(),
        "command": " ".join(["python", "benchmarks/gpu/sglang_loop.py", *sys.argv[1:]]),
        "machine": machine(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "shape": args.shape,
        "errors": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder) / "model", args.shape, context=1024)
        for name in args.parts.split(","):
            since = time.monotonic()
            print(f"-- {name}", file=sys.stderr, flush=True)
            try:
                result[name] = {}
                args.save = lambda: args.out.write_text(json.dumps(result, indent=1) + "\n")
                PARTS[name](Path(folder), args, result[name])
            except BaseException:  # noqa: BLE001 - the others go on
                result["errors"].append(f"{name}: {traceback.format_exc()[-1500:]}")
                print(traceback.format_exc(), file=sys.stderr, flush=True)
            print(f"-- {name} took {time.monotonic() - since:.1f} s", file=sys.stderr, flush=True)
            args.save()
    print(json.dumps(result))


def storm(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Kill each of three kinds of process so many times."""
    replicas = 3 if ON_GPU else 2
    plan = [(kind, number % replicas) for number, kind in enumerate(KINDS * args.times)]
    run = Run(folder, args, "storm", replicas=replicas, spares=0)
    run.go(Killer(run, plan, others=1, pause_s=3.0))
    found |= run.summary() | {"restarts": run.restarts()}


def spare(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Kill an actor with a server that waits beside it."""
    run = Run(folder, args, "spare", replicas=1, spares=1)
    run.go(Killer(run, [("actor", 0)] * args.times, others=0, pause_s=8.0))
    found |= run.summary() | {"restarts": run.restarts()}


def same(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Sample the same in a calm run and in one with three kills."""
    samples: list[dict[str, str]] = []
    runs = found["runs"] = []
    for name, plan in (("calm", []), ("killed", [(kind, n % 2) for n, kind in enumerate(KINDS)])):
        run = Run(
            folder,
            args,
            name,
            replicas=2 if ON_GPU else 1,
            spares=0,
            run={"steps": 8, "max_staleness": 0},
            rollout={"deterministic": ON_GPU, "update_mode": "abort"}
            | ({"max_new_tokens": 96} if ON_GPU else {}),
            train={"learning_rate": 1e-5, "deterministic": True},
        )
        run.go(Killer(run, plan if ON_GPU else plan[:1], others=0, pause_s=0.0), to_the_end=True)
        samples.append(run.samples())
        steps = [{str(group) for group in event["groups"]} for event in run.of("step")]
        runs.append(run.summary())
        args.save()
    calm, killed = samples
    found |= {
        "samples": len(calm),
        "same_samples": sum(killed.get(key) == text for key, text in calm.items()),
        "same_samples_of_each_step": [
            sum(killed.get(key) == text for key, text in calm.items() if key.partition("/")[0] in groups)
            for groups in steps
        ],
        "keys_are_the_same": calm.keys() == killed.keys(),
        "final_weights_are_the_same": runs[0]["weights_xxh3"] == runs[1]["weights_xxh3"],
    }


def experts(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Train a mixture of experts by the experts that SGLang took, and by the trainer's own."""
    shape = "small-moe" if ON_GPU else "tiny-moe"
    model_folder(folder / "moe", shape, context=1024)
    found["shape"] = shape
    for name, fields in (("replayed", {"use_r3": True}), ("own", {})):
        run = Run(
            folder,
            args,
            name,
            replicas=1,
            spares=0,
            run={"steps": 6},
            model={"path": str(folder / "moe")},
            rollout={
                "sglang_args": (*server_words(), *(("--moe-runner-backend", "triton") if ON_GPU else ()))
            },
            train=fields,
        )
        run.go(Killer(run, [], others=0, pause_s=0.0), to_the_end=True)
        steps = run.of("step")
        found[name] = run.summary() | {
            key: [round(step[key], 5) for step in steps]
            for key in ("mismatch_abs", "mismatch_k3", "max_ratio")
        }
        args.save()


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

    def go(self, killer: "Killer", *, to_the_end: bool = False) -> None:
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


class Killer:
    """Kills by a plan, each once the replica works and enough others do."""

    def __init__(self, run: Run, plan: list[tuple[str, int]], *, others: int, pause_s: float) -> None:
        self._run, self._plan, self._others, self._pause_s = run, [*plan], others, pause_s
        self.kills: list[dict[str, Any]] = []
        self._next_at, self._looked = 0.0, 0.0

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be killed any more, and everybody is active again."""
        return not self._plan and len(self._active()) == self._run.replicas

    def look(self) -> None:
        """Kill, if it is time."""
        now = time.monotonic()
        if not self._plan or now < self._next_at or now - self._looked < 0.2:
            return
        self._looked = now
        if len(self._run.of("engine_started")) < len(self.kills) + self._run.servers:
            return  # a server that is to take over is still starting
        kind, replica = self._plan[0]
        name, active = f"rollout/{replica}", self._active()
        busy = self._under_way()
        if name in active and len(active) > self._others and busy and self._run.steps() >= len(self.kills):
            pid = self._victim(kind, name)
            if pid is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills.append(
                    {
                        "kind": kind,
                        "actor": name,
                        "incarnation": active[name],
                        "m": time.monotonic(),
                        "leased": busy,
                    }
                )
                self._plan.pop(0)
                self._next_at = time.monotonic() + self._pause_s

    def _active(self) -> dict[str, int]:
        """Return the incarnations that sample now, by name."""
        active = {event["child"]: event["incarnation"] for event in self._run.of("child_active")}
        newest = {event["child"]: event["incarnation"] for event in self._run.of("child_spawned")}
        killed = {(kill["actor"], kill["incarnation"]) for kill in self.kills}
        return {
            name: number
            for name, number in active.items()
            if newest.get(name, number) == number and (name, number) not in killed
        }

    def _under_way(self) -> int:
        ledger = self._run.of("ledger")
        return ledger[-1]["running"] if ledger else 0

    def _victim(self, kind: str, name: str) -> int | None:
        started = [event for event in self._run.of("engine_started") if event["actor"] == name]
        if not started:
            return None
        server = started[-1]["server_pid"]
        with contextlib.suppress(psutil.Error):
            if kind == "main":
                return server
            if kind == "actor":
                return psutil.Process(server).ppid()
            for child in psutil.Process(server).children(recursive=True):
                if "scheduler" in " ".join(child.cmdline()):
                    return child.pid
        return None


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


PARTS: dict[str, Callable[[Path, argparse.Namespace, dict[str, Any]], None]] = {
    "storm": storm,
    "spare": spare,
    "same": same,
    "experts": experts,
    "colocate": lambda *args: sglang_turns.measure(sys.modules[__name__], *args),
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=("tiny", "0.6b"), default="0.6b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit-s", type=float, default=200.0, help="of each run")
    parser.add_argument("--times", type=int, default=3 if ON_GPU else 1, help="kills of each kind")
    parser.add_argument("--chunk-tokens", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
