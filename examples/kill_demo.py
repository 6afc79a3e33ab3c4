"""Train while a rollout is killed twice in mid-group, and show that training does not notice.

    python examples/kill_demo.py MODEL_FOLDER      # the arithmetic job; `make demo-kill` prepares the folder
    python examples/kill_demo.py --tiny            # a tiny random model and the scripted engine, 15 s

`rollout/0` gets SIGKILL whenever samples of a training prompt are unfinished in it: once after step 1, again
when its next incarnation samples. The report at the end is computed from what the run wrote down, its
event log and the TransferQueue's journal. Exit code 1 if anything in it is not as promised.
"""

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
VICTIM = "rollout/0"
KILLS = 2
SAMPLING_S = 0.3
"""How long the victim must have had a policy before it is killed."""

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What was killed, when, and what it was doing."""

    at: float  # monotonic seconds, as `m` of an event
    incarnation: int
    pid: int
    step: int  # steps done
    samples: int  # unfinished
    prompts: tuple[int, ...]  # of which they are samples


def main() -> int:
    """Run the job, kill, report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="what arithmetic/prepare.py wrote")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, scripted engine")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--run-dir", default="runs/kill-demo-{time}", help="default: %(default)s")
    args = parser.parse_args()
    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            return demonstrate(tiny_settings(Path(folder), args.steps), args.run_dir)
    if args.model is None:
        parser.error("MODEL_FOLDER or --tiny is wanted")
    return demonstrate(arithmetic_settings(args.model, args.steps), args.run_dir)


def arithmetic_settings(folder: Path, steps: int) -> tuple[Path | None, list[str]]:
    """Return configuration file and overrides of the arithmetic job without its evaluation."""
    return EXAMPLES / "arithmetic" / "arithmetic.toml", [
        f"model.path={folder}",
        f"data.path={folder}/train.jsonl",
        f"data.prefix_path={folder}/prefix.txt",
        f"eval.path={folder}/heldout.jsonl",
        "eval.every=0",
        f"run.steps={steps}",
    ]


def tiny_settings(folder: Path, steps: int) -> tuple[Path | None, list[str]]:
    """Write a random model and prompts; return the overrides of a job that samples at a fixed pace."""
    from spell_backward.char_model import char_tokenizer, save, tiny_qwen3  # noqa: PLC0415 - imports torch

    tokenizer = char_tokenizer()
    save(folder, tiny_qwen3(len(tokenizer), hidden=64, layers=2), tokenizer)
    rows = "".join(f'{{"prompt": "word {n}", "label": "{n}"}}\n' for n in range(40))
    (folder / "rows.jsonl").write_text(rows)
    return None, [
        f"model.path={folder}",
        "model.dtype=float32",
        f"data.path={folder}/rows.jsonl",
        f"run.steps={steps}",
        f"run.user_path={EXAMPLES}",
        "rollout.replicas=2",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=40",
        "rollout.engine=scripted",  # a fast machine would be done before the second kill
        "rollout.scripted_token_s=0.02",
        "rollout.max_in_flight=8",
        "reward.function=kill_demo:share_of_letters",
        "train.global_batch_size=16",
        "train.micro_batch_size=8",
        "train.learning_rate=1e-3",
    ]


def share_of_letters(*, response: str) -> float:
    """Return the reward of the tiny job."""
    return sum(character.isalpha() for character in response) / max(1, len(response))


def demonstrate(settings: tuple[Path | None, list[str]], pattern: str) -> int:
    """Run, kill and report; return the exit code."""
    from launcher.runfolder import RunFolder  # noqa: PLC0415 - a reward process imports this file too
    from launcher.settings import load  # noqa: PLC0415
    from relax_actor import app  # noqa: PLC0415

    config_path, overrides = settings
    config = load(config_path, overrides)
    folder, run_id = RunFolder.create(pattern, name="kill-demo"), secrets.token_hex(4)
    print(f"run folder: {folder.path}", flush=True)
    with folder.locked(run_id):
        killer = Killer(folder.path, run_id)
        outcome = app.run(config, folder.path, run_id=run_id, on_tick=killer.tick)
    problems = [] if outcome.exit_code == 0 else [f"the run failed: {outcome.reason}"]
    for line, ok in report(killer, config.run.steps):
        print(line if ok else f"{line}  <- NOT AS PROMISED")
        problems += [] if ok else [line]
    print(f"{'failed: ' + problems[0] if problems else 'as promised'} ({folder.path})")
    return int(bool(problems))


class Killer:
    """Follows a run and kills its victim in the middle of its work.

    Args:
        folder: of the run.
        run_id: of the run.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.events: list[Event] = []
        self.kills: list[Kill] = []
        self.journal = folder / f"queue-{run_id}.journal"
        self._log, self._offset = folder / "events.jsonl", 0

    def tick(self) -> None:
        """Read what is new, say the steps, kill if it is time."""
        for event in self.read():
            if event["kind"] == "step":
                print(f"step {event['step']}: reward {event['reward_mean']:.3f}", flush=True)
        active = self.last("child_active", child=VICTIM, incarnation=len(self.kills) + 1)
        steps = len(self.all("step"))
        if len(self.kills) == KILLS or active is None or steps <= len(self.kills):
            return
        if time.monotonic() - active["m"] >= SAMPLING_S and (leased := unfinished(self.journal)):
            self._kill(active, steps, leased)

    def read(self) -> list[Event]:
        """Return the events that are new."""
        from relax_actor.telemetry import read_events  # noqa: PLC0415 - as above

        new, self._offset = read_events(self._log, self._offset)
        self.events += new
        return new

    def all(self, kind: str, **fields: Any) -> list[Event]:
        """Return the events of one kind whose fields are these."""
        return [
            event
            for event in self.events
            if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items())
        ]

    def last(self, kind: str, **fields: Any) -> Event | None:
        """Return the last of them."""
        found = self.all(kind, **fields)
        return found[-1] if found else None

    def _kill(self, active: Event, steps: int, leased: dict[int, int]) -> None:
        kill = Kill(
            at=time.monotonic(),
            incarnation=active["inc"],
            pid=active["pid"],
            step=steps,
            samples=sum(leased.values()),
            prompts=tuple(leased),
        )
        os.kill(kill.pid, signal.SIGKILL)
        self.kills.append(kill)
        print(f"SIGKILL to {VICTIM} (pid {kill.pid}), unfinished samples in it: {kill.samples}", flush=True)


def unfinished(journal: Path) -> dict[int, int]:
    """Return how many samples of each training prompt the victim holds and has not finished."""
    from relax_actor.transfer_queue import events  # noqa: PLC0415 - as above
    from relax_actor.transfer_queue.journal import read  # noqa: PLC0415

    open_leases: dict[int, tuple[int, set[int]]] = {}
    for event in read(journal):
        if isinstance(event, events.PromptLeased) and event.holder.name == VICTIM and event.group_id >= 0:
            open_leases[event.lease_id] = event.group_id, set(event.rows)
        elif isinstance(event, events.SamplesPut):
            for sample in event.samples:
                if sample.lease_id in open_leases:
                    open_leases[sample.lease_id][1].discard(sample.sample_index)
        elif isinstance(event, events.LeaseEnded):
            open_leases.pop(event.lease_id, None)
    return {group: len(rows) for group, rows in open_leases.values() if rows}


def report(run: Killer, steps: int) -> list[tuple[str, bool]]:
    """Return what became of the promises: a line each, and whether it holds."""
    run.read()
    lines = [(f"killed {len(run.kills)} times (wanted: {KILLS})", len(run.kills) == KILLS)]
    for kill in run.kills:
        lines += _came_back(run, kill)
    return [*lines, _trainer(run), _steps(run, steps), *_prompts(run)]


def _came_back(run: Killer, kill: Kill) -> list[tuple[str, bool]]:
    again = {"child": VICTIM, "incarnation": kill.incarnation + 1}
    spawned, active = run.last("child_spawned", **again), run.last("child_active", **again)
    head = (
        f"{VICTIM} killed after step {kill.step} (pid {kill.pid}), "
        f"unfinished: {kill.samples} of the samples of {len(kill.prompts)} prompts"
    )
    if spawned is None or active is None:
        return [(f"{head}: did not come back", False)]
    version = active["policy_version"]
    published = _published(run, before=active["m"] - _install_s(run, kill.incarnation + 1))
    first = _first_prompt(run, kill.incarnation + 1)
    moments = {"new process": spawned["m"], "active": active["m"], "first prompt": first}
    said = ", ".join(
        f"no {name}" if moment is None else f"{name} {moment - kill.at:.2f} s"
        for name, moment in moments.items()
    )
    return [
        (f"{head}; after the kill: {said}", True),
        (f"  active with policy version {version}, the newest was {published}", version >= published),
    ]


def _install_s(run: Killer, incarnation: int) -> float:
    installed = run.all("policy_installed", actor=VICTIM, inc=incarnation)
    return float(installed[0]["seconds"]) if installed else 0.0


def _published(run: Killer, before: float) -> int:
    return max((event["version"] for event in run.all("policy_published") if event["m"] < before), default=-1)


def _first_prompt(run: Killer, incarnation: int) -> float | None:
    from relax_actor.transfer_queue import events  # noqa: PLC0415 - as above
    from relax_actor.transfer_queue.journal import read  # noqa: PLC0415

    leases = (event for event in read(run.journal) if isinstance(event, events.PromptLeased))
    holder = (VICTIM, incarnation)
    return next(
        (each.since_s for each in leases if (each.holder.name, each.holder.incarnation) == holder), None
    )


def _trainer(run: Killer) -> tuple[str, bool]:
    pids = {event["pid"] for event in run.all("child_spawned", child="trainer")}
    return f"trainer: one process from start to end, pid {', '.join(map(str, pids))}", len(pids) == 1


def _steps(run: Killer, steps: int) -> tuple[str, bool]:
    done = [event["step"] for event in run.all("step")]
    return f"steps: {', '.join(map(str, done))}", done == list(range(1, steps + 1))


def _prompts(run: Killer) -> list[tuple[str, bool]]:
    trained = [group for event in run.all("step") for group in event["groups"]]
    dropped = [event["group_id"] for event in run.all("group_dropped") if event["group_id"] >= 0]
    hit = {group for kill in run.kills for group in kill.prompts}
    once = sorted(trained + dropped) == list(range(len(trained) + len(dropped)))
    return [
        (f"prompts: {len(trained)} trained, {len(dropped)} dropped, each once", once),
        (f"prompts that were in the killed processes: {len(hit)}, all of them trained", hit <= set(trained)),
    ]


if __name__ == "__main__":
    sys.exit(main())
