"""A whole run as a test sees it: its configuration, its events, its final weights, what it left behind."""

import functools
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from loop_faults import Until, carried_out, is_kill
from safetensors.numpy import load_file

from relax_actor import app, faults
from relax_actor.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    QueueConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from relax_actor.faults import Fault
from relax_actor.protocol import SampleReady
from relax_actor.supervision.spec import Backoff
from relax_actor.telemetry import Event, read_events
from relax_actor.trainers.checkpoint import CheckpointStore
from relax_actor.transfer_queue.events import Event as LedgerEvent
from relax_actor.transfer_queue.events import PromptLeased, SamplesPut
from relax_actor.transfer_queue.journal import read
from transport.shm import ShmSpace

SUPPORT = Path(__file__).parent
QUICK = Backoff(base_s=0.02, cap_s=0.1)
DEADLINE_S = 150.0
GROUPS_PER_STEP = 4
ENDLESS_STEPS = 1000
"""Of a run that is stopped when it has seen what it is for."""

PARK_S = 19.0
"""A trainer that waits for so long was forgotten: its request ends after 20 s and finds what was there."""


def loop_config(tiny_model: Any, *, rows: Path | None = None, **sections: dict[str, Any]) -> Config:
    """Return the configuration of a quick run; `sections` overrides single fields, section by section."""
    config = Config(
        run=RunConfig(steps=5, max_staleness=1, grace_s=20.0, user_path=str(SUPPORT)),
        model=ModelConfig(path=str(tiny_model.path), dtype="float32"),
        data=DataConfig(path=str(rows or tiny_model.rows(60))),
        rollout=RolloutConfig(
            engine="scripted", replicas=2, samples_per_prompt=4, max_new_tokens=6, max_in_flight=8
        ),
        reward=RewardConfig(function="user_rewards:varied"),
        train=TrainConfig(
            global_batch_size=4 * GROUPS_PER_STEP, micro_batch_size=8, learning_rate=1e-3, keep_checkpoints=9
        ),
        queue=QueueConfig(max_attempts=100),
        eval=EvalConfig(),
    )
    replaced = {
        name: msgspec.structs.replace(getattr(config, name), **fields) for name, fields in sections.items()
    }
    return msgspec.structs.replace(config, **replaced)


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """A run that has ended."""

    config: Config
    folder: Path
    run_id: str
    outcome: app.Outcome
    events: list[Event]

    def of(self, kind: str, **fields: Any) -> list[Event]:
        """Return the events of a kind with these field values."""
        found = [event for event in self.events if event["kind"] == kind]
        return [event for event in found if all(event.get(name) == value for name, value in fields.items())]

    @property
    def history(self) -> list[Event]:
        """The `step` events that lead to the final weights: a step done again replaces what followed it."""
        history: list[Event] = []
        for event in self.of("step"):
            history = [*(each for each in history if each["step"] < event["step"]), event]
        return history

    @property
    def trained(self) -> list[int]:
        """The positions of the prompt stream in the history, sorted, repetitions included."""
        return sorted(group for event in self.history for group in event["groups"])

    @property
    def steps(self) -> int:
        """How many steps led to the final weights: all that were wanted, unless the run was to be stopped."""
        wanted = self.config.run.steps
        return len(self.history) if wanted == ENDLESS_STEPS else wanted

    @property
    def killed(self) -> list[str]:
        """Who died of SIGKILL, in order."""
        return [event["child"] for event in self.events if is_kill(event)]

    @property
    def log(self) -> str:
        """What happened, for a failing assertion."""
        kinds = [
            (event["kind"], event.get("child") or event["actor"], event.get("reason", ""))
            for event in self.events
            if event["kind"] not in {"span", "ledger"}
        ]
        return f"{self.outcome}\n" + "\n".join(map(str, kinds[-60:]))

    @property
    def journal(self) -> list[LedgerEvent]:
        """What the queue has written down."""
        return list(read(self.folder / f"queue-{self.run_id}.journal"))

    @property
    def samples_put(self) -> list[SampleReady]:
        """The samples that the queue has taken, in order."""
        return [sample for event in self.journal if isinstance(event, SamplesPut) for sample in event.samples]

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """The weights in the newest checkpoint."""
        newest = CheckpointStore(self.folder / "checkpoints", keep=1).latest()
        assert newest is not None
        return dict(load_file(newest.path / "model" / "model.safetensors"))

    @property
    def weights(self) -> dict[str, bytes]:
        """The bytes of each tensor, to be compared bit for bit."""
        return {name: value.tobytes() for name, value in self.tensors.items()}


class LoopRunner:
    """Starts runs in folders of their own below a test's temporary folder.

    Args:
        folder: for the run folders.
        tiny_model: the fixture.
    """

    def __init__(self, folder: Path, tiny_model: Any) -> None:
        self._folder, self._tiny_model, self._count = folder, tiny_model, itertools.count()

    def config(self, **sections: Any) -> Config:
        """Return the configuration of a quick run; see `loop_config`."""
        return loop_config(self._tiny_model, **sections)

    def __call__(
        self,
        *,
        plan: Sequence[Fault] = (),
        config: Config | None = None,
        folder: Path | None = None,
        resume: Path | None = None,
        control: app.RunControl | None = None,
        on_tick: Callable[[Path], None] = lambda _folder: None,
        deadline_s: float = DEADLINE_S,
        on_hosts: Mapping[str, Any] = MappingProxyType({}),
        **sections: Any,
    ) -> LoopRun:
        """Run to the end, in this process; `outcome` says so when the deadline had to kill it."""
        folder = folder or self._folder / f"run-{next(self._count)}"
        folder.mkdir(parents=True, exist_ok=True)
        control = control or app.RunControl()
        run_id, deadline = secrets.token_hex(4), time.monotonic() + deadline_s

        def tick() -> None:
            if time.monotonic() > deadline:
                control.kill("the deadline of the test")
            on_tick(folder)

        config = config or self.config(**sections)
        outcome = app.run(
            config,
            folder,
            run_id=run_id,
            resume=resume,
            control=control,
            on_tick=tick,
            env={"OMP_NUM_THREADS": "1", **faults.plan([*plan])},
            backoff=QUICK,
            **on_hosts,
        )
        events, _ = read_events(folder / "events.jsonl")
        start = next(index for index, event in enumerate(events) if event.get("run_id") == run_id)
        return LoopRun(config=config, folder=folder, run_id=run_id, outcome=outcome, events=events[start:])

    def until(
        self,
        seen: Callable[[Sequence[Event]], object],
        *,
        more_steps: int = 2,
        on_tick: Callable[[Path], object] = lambda _folder: None,
        **options: Any,
    ) -> LoopRun:
        """Run for as long as it takes, and then for some steps more, however slow everything is.

        Args:
            seen: whether the run's events so far have what it is for.
            more_steps: that are to follow.
            on_tick: called before.
            options: as for a run; no number of steps.
        """
        control = app.RunControl()
        options["run"] = {**options.get("run", {}), "steps": ENDLESS_STEPS}
        watch = Until(seen, control, on_tick, more_steps=more_steps)
        return self(control=control, on_tick=watch, **options)

    def until_killed(self, plan: Sequence[Fault], **options: Any) -> LoopRun:
        """Run until a plan of kills is carried out and its rollouts are back; see `until`."""
        return self.until(carried_out(plan), plan=plan, **options)


def kills(actor: str, *points: str | tuple[str, int]) -> list[Fault]:
    """Plan that the first incarnation dies at the first point, the second at the second, and so on."""
    plan = []
    for incarnation, where in enumerate(points, start=1):
        point, nth = (where, 1) if isinstance(where, str) else where
        plan.append(Fault(actor=actor, point=point, nth=nth, incarnation=incarnation))
    return plan


def assert_kept_its_promises(run: LoopRun, *, waits: bool = True) -> None:
    """Check what holds of every run that succeeds, whatever died in it (I2, I3, I4, I7, I8).

    Args:
        run: that has ended.
        waits: whether nobody had a reason to wait for as long as a forgotten trainer does.
    """
    assert run.outcome.exit_code == (143 if run.config.run.steps == ENDLESS_STEPS else 0), run.log
    steps, staleness = run.steps, run.config.run.max_staleness
    assert [event["step"] for event in run.history] == list(range(1, steps + 1))
    assert len(run.trained) == len(set(run.trained)), "a prompt was trained twice"
    assert all(event["balances"] for event in run.of("ledger"))  # I2
    assert all(int(age) <= staleness for event in run.of("step") for age in event["staleness"])  # I3
    assert not waits or all(event["wait_s"] < PARK_S for event in run.of("step")), (
        "nobody woke who could have gone on"
    )  # I9
    assert_versions_never_go_back(run)
    assert_only_installed_policies_were_sampled(run)
    assert_nothing_is_left(run)


def assert_trained_in_order(run: LoopRun) -> None:
    """Check that exactly the first prompts of the stream are trained, each once.

    A run that is stopped may stop between batches that share a window, of which later prompts came first.
    """
    count = run.steps * GROUPS_PER_STEP
    if run.config.run.steps == ENDLESS_STEPS:
        surplus = run.config.staleness_window - GROUPS_PER_STEP
        assert len(run.trained) == len(set(run.trained)) == count, run.log
        assert max(run.trained, default=0) < count + surplus, (run.trained, run.log)
    else:
        assert run.trained == list(range(count)), (run.trained, run.log)


def assert_trainer_went_on(run: LoopRun) -> None:
    """Check that the trainer was neither restarted nor made to repeat a step (I5)."""
    assert len({event["pid"] for event in run.of("step")}) == 1
    assert [event["step"] for event in run.of("step")] == list(range(1, run.steps + 1))


def assert_versions_never_go_back(run: LoopRun) -> None:
    """Check the order of the versions that were published, and installed by each incarnation (I7)."""
    published = [event["version"] for event in run.of("policy_published")]
    assert published == sorted(set(published))
    installed: dict[tuple[str, int], list[int]] = {}
    for event in run.of("policy_installed"):
        installed.setdefault((event["actor"], event["inc"]), []).append(event["version"])
    assert all(versions == sorted(set(versions)) for versions in installed.values())


def assert_only_installed_policies_were_sampled(run: LoopRun) -> None:
    """Check that no incarnation got a prompt before it had installed the version of its lease (I4)."""
    installed = {
        (each["actor"], each["inc"], each["version"]): each["m"] for each in run.of("policy_installed")
    }
    leases = [event for event in run.journal if isinstance(event, PromptLeased)]
    assert leases
    for lease in leases:
        since = installed[lease.holder.name, lease.holder.incarnation, lease.version]
        assert since <= lease.since_s + 1e-3, f"{lease.holder} was given a prompt too early"


def assert_active_at_the_end(run: LoopRun, actor: str) -> None:
    """Check that the last incarnation got the policy that was current when it began, or a newer one (I7)."""
    last = max(event["incarnation"] for event in run.of("child_spawned", child=actor))
    active = run.of("child_active", child=actor, incarnation=last)
    assert active, f"{actor} incarnation {last} never became active\n{run.log}"
    spawned = run.of("child_spawned", child=actor, incarnation=last)[0]
    before = [event["version"] for event in run.of("policy_published") if event["m"] < spawned["m"]]
    assert active[0]["policy_version"] >= max(before, default=0)


def assert_nothing_is_left(run: LoopRun) -> None:
    """Check that no process, socket and segment of the run is there (I8)."""
    assert leftovers(run.folder, run.run_id) == []


def leftovers(folder: Path, run_id: str) -> list[str]:
    """Name the processes with a file of the run folder open, the sockets and the segments of a run."""
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if f"/{run_id}/" in line]
    segments = ShmSpace(run_id).names()
    return [*(f"process {pid}" for pid in processes_of(folder)), *sockets, *segments]


def processes_of(folder: Path) -> list[int]:
    """Return the pids, but our own, that have a file below the folder open, such as their log."""
    where = f"{folder.resolve()}/"
    others = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(entry.name) for entry in others if int(entry.name) != os.getpid() and _has_open(entry, where)]


def _has_open(entry: Path, where: str) -> bool:
    try:
        return any(str(fd.readlink()).startswith(where) for fd in (entry / "fd").iterdir())
    except OSError:  # it ended, or it is not ours
        return False
