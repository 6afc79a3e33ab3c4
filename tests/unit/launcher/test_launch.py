"""A launch checks, locks, runs, watches, reports; signals stop it and then kill it."""

import io
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from launcher.errors import RefusedError, RunFolderError
from launcher.launch import Job, Request, launch
from launcher.options import Launcher
from launcher.preparing import gpus_here
from launcher.settings import load
from relax_actor.placement import Seat
from relax_actor.trainers.checkpoint import CheckpointStore
from transport.ports import VARIABLE


class Outcome(msgspec.Struct):
    exit_code: int
    reason: str = ""


class Control:
    def __init__(self) -> None:
        self.told: list[str] = []

    def stop(self, reason: str) -> None:
        self.told.append(f"stop {reason}")

    def kill(self, reason: str) -> None:
        self.told.append(f"kill {reason}")


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def request_of(config, run_dir):
    def make(*overrides: str, resume: str | None = None, **options) -> Request:
        flags = {"--model": config.model.path, "--dataset": config.data.path, "--run-dir": str(run_dir)}
        flags["--resume"] = resume
        overrides = ("queue.max_size_gb=0.001", *overrides)
        return Request(overrides=overrides, flags=flags, **options)

    return make


@pytest.fixture
def runner(story, log_of):
    """A stand-in for the whole tree: it writes a story's events and returns an outcome."""

    class Runner:
        def __init__(self) -> None:
            self.job: Job | None = None
            self.control = Control()
            self.outcome = Outcome(0)
            self.during = lambda: None

        def __call__(self, job: Job, hand_over) -> Outcome:
            self.job = job
            hand_over(self.control)
            log_of(job.folder.events, *story)
            job.on_tick()
            self.during()
            log_of(job.folder.events, {"kind": "run_ended", "exit_code": self.outcome.exit_code})
            return self.outcome

    return Runner()


def test_a_launch_runs_and_leaves_everything_in_its_folder(request_of, runner, run_dir):
    out = io.StringIO()

    assert launch(request_of(), out, runner) == 0

    job = runner.job
    assert len(job.run_id) == 8
    assert job.resume is None
    assert job.config.run.dir == str(run_dir)
    assert load(run_dir / "resolved.toml") == job.config
    assert json.loads((run_dir / "plan.json").read_text())["steps"] == 100
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run_dir / "reward.png").exists()
    lines = out.getvalue().splitlines()
    assert lines[0] == "run 0011aabb started: async_off_policy, max_staleness 1"
    assert lines[-1].startswith("done: step 1 of 4")


def test_a_run_whose_output_cannot_be_written_is_done_all_the_same(request_of, runner, run_dir):
    code = -1
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as out:  # closing it raises, too
        code = launch(request_of(), out, runner)

    assert code == 0
    assert (run_dir / "reward.png").exists()


def test_a_failed_run_says_why_and_returns_its_code(request_of, runner):
    runner.outcome = Outcome(1, "`rollout/0` died")
    out = io.StringIO()

    assert launch(request_of(), out, runner) == 1
    assert out.getvalue().splitlines()[-1].startswith("failed: `rollout/0` died (exit code 1, log: ")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_stops_and_the_second_kills(request_of, runner, number, code, monkeypatch):
    monkeypatch.setattr("launcher.interrupts.ECHO_S", 0.0)  # no time passes between them here
    before = signal.getsignal(number)

    def twice() -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)

    runner.during = twice
    runner.outcome = Outcome(1, "stopped")

    assert launch(request_of(), io.StringIO(), runner) == code
    assert runner.control.told == [f"stop {signal.Signals(number).name}", "kill SIGTERM"]
    assert signal.getsignal(number) is before


def test_a_signal_before_there_is_a_tree_stops_it_when_there_is_one(request_of, runner):
    control = Control()

    def late(job: Job, hand_over) -> Outcome:
        os.kill(os.getpid(), signal.SIGINT)
        hand_over(control)
        return Outcome(1)

    assert launch(request_of(), io.StringIO(), late) == 130
    assert control.told == ["stop SIGINT"]


def test_a_signal_that_comes_when_all_is_done_changes_nothing(request_of, runner):
    runner.during = lambda: os.kill(os.getpid(), signal.SIGTERM)

    assert launch(request_of(), io.StringIO(), runner) == 0


def test_a_wrong_configuration_starts_nothing(request_of, runner, run_dir):
    with pytest.raises(RefusedError) as caught:
        launch(request_of("rollout.replicas=0"), io.StringIO(), runner)

    assert caught.value.exit_code == 2
    assert not run_dir.exists()


def test_a_machine_without_room_starts_nothing(request_of, runner, run_dir):
    with pytest.raises(RefusedError) as caught:
        launch(request_of("queue.max_size_gb=1e9"), io.StringIO(), runner)

    assert caught.value.exit_code == 3
    assert not run_dir.exists()


def test_an_earlier_run_is_not_written_over(request_of, runner):
    launch(request_of(), io.StringIO(), runner)

    with pytest.raises(RefusedError, match="holds an earlier run") as caught:
        launch(request_of(), io.StringIO(), runner)

    assert "--resume auto" in caught.value.hint


def test_resume_auto_goes_on_from_the_newest_checkpoint_or_starts(request_of, runner, run_dir):
    launch(request_of(resume="auto"), io.StringIO(), runner)
    assert runner.job.resume is None

    store = CheckpointStore(run_dir / "checkpoints")
    for step in (1, 2):
        newest = store.save(step, lambda folder: (folder / "weights").touch(), {})
    out = io.StringIO()
    launch(request_of(resume="auto"), out, runner)

    assert runner.job.resume == newest
    assert out.getvalue().count("started:") == 1


def test_resume_takes_a_checkpoint_of_another_run(request_of, runner, tmp_path):
    checkpoint = CheckpointStore(tmp_path / "other").save(1, lambda folder: (folder / "w").touch(), {})

    launch(request_of(resume=str(checkpoint)), io.StringIO(), runner)

    assert runner.job.resume == checkpoint


def test_resume_takes_a_step_of_the_run_itself(request_of, runner, run_dir):
    store = CheckpointStore(run_dir / "checkpoints")
    first, _ = (store.save(step, lambda folder: (folder / "w").touch(), {}) for step in (1, 2))

    launch(request_of(resume="1"), io.StringIO(), runner)

    assert runner.job.resume == first
    with pytest.raises(RefusedError, match=r"`--resume` is no whole checkpoint: .*no checkpoint of step 7"):
        launch(request_of(resume="7"), io.StringIO(), runner)


def test_a_job_knows_its_hosts_and_who_goes_where(request_of, runner):
    words = {"--hosts": "a:2,b:2", "--rollout-gpus": "3", "--env": ("A=1",), "--preflight": "off"}

    assert launch(request_of(words=words), io.StringIO(), runner) == 0

    job = runner.job
    assert job.config.rollout.replicas == 3
    assert (job.options.launcher, job.options.remote.env) == (Launcher.SSH, (("A", "1"),))
    assert job.placement.seat("rollout/2") == Seat(actor="rollout/2", host="b", gpus=("1",))


def test_this_host_alone_is_placed_where_somebody_says_so(request_of, runner):
    launch(request_of(resume="auto"), io.StringIO(), runner)
    assert runner.job.placement is None

    launch(
        request_of("rollout.device=cpu", "train.device=cpu", resume="auto", words={"--hosts": "localhost:2"}),
        io.StringIO(),
        runner,
    )
    assert runner.job.placement.hosts == ("local",)


def test_gpus_that_are_not_here_can_be_planned_but_not_launched(request_of, runner, monkeypatch):
    monkeypatch.setattr("launcher.preparing.host_gpus", lambda _: 0)
    words = {"--gpus": "4"}

    assert launch(request_of(words=words, dry_run=True), io.StringIO(), runner) == 0
    with pytest.raises(RefusedError, match="`trainer` needs 1 GPU of local, which has 0"):
        launch(request_of(words=words), io.StringIO(), runner)


def test_gpus_of_this_host_are_named_as_it_names_them(monkeypatch):
    monkeypatch.setattr("launcher.preparing.host_gpus", lambda _: 2)

    assert gpus_here({}) == ("0", "1")
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ("GPU-a", "GPU-b")


def test_a_rehearsal_in_an_allocation_asks_none_of_its_hosts(request_of, runner, monkeypatch, tmp_path):
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[08-09]")
    out = io.StringIO()

    assert launch(request_of(dry_run=True), out, runner) == 0
    assert "n08   asked at the start" in out.getvalue()


def test_a_job_is_shown_before_it_is_submitted(request_of, runner, run_dir):
    request = request_of(words={"--slurm": True, "--nodes": "2"}, dry_run=True)
    request = msgspec.structs.replace(request, argv=("run.toml", "--slurm", "--nodes", "2", "--dry-run"))
    request.flags["--run-dir"] = str(run_dir)
    out = io.StringIO()

    assert launch(request, out, runner) == 0

    assert "  #SBATCH --nodes=2" in out.getvalue()
    script = (run_dir / "job.sbatch").read_text()
    assert f"launch run.toml --launcher slurm --run-dir {run_dir} --resume auto" in script


def test_a_submitted_job_starts_nothing_here(request_of, runner, run_dir, monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 42\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    out = io.StringIO()

    assert launch(request_of(words={"--slurm": True}), out, runner) == 0

    assert "submitted job 42" in out.getvalue()
    assert runner.job is None


def test_a_range_of_ports_is_told_to_all_that_runs(request_of, runner, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1-2")
    words = {"--hosts": "a:1", "--port-range": "20000-20999", "--preflight": "off"}

    devices = ("rollout.device=cpu", "train.device=cpu")
    assert launch(request_of(*devices, words=words), io.StringIO(), runner) == 0

    assert os.environ[VARIABLE] == "20000-20999"
    assert runner.job.options.remote.env == ((VARIABLE, "20000-20999"),)


def test_logs_may_go_elsewhere(request_of, runner, run_dir, tmp_path):
    words = {"--log-dir": str(tmp_path / "logs")}

    assert launch(request_of(words=words), io.StringIO(), runner) == 0
    assert launch(request_of(words=words, resume="auto"), io.StringIO(), runner) == 0

    assert (run_dir / "logs").resolve() == tmp_path / "logs" / "run"
    (run_dir / "logs").unlink()
    (run_dir / "logs").mkdir()
    with pytest.raises(RunFolderError, match="is there already"):
        launch(request_of(words=words, resume="auto"), io.StringIO(), runner)


def test_a_second_launch_in_a_running_folder_is_refused(request_of, runner):
    def again() -> None:
        with pytest.raises(RunFolderError, match=f"is in use by pid {os.getpid()}"):
            launch(request_of(), io.StringIO(), runner)

    runner.during = again
    assert launch(request_of(), io.StringIO(), runner) == 0


def test_a_dry_run_starts_nothing_and_writes_where_it_was_told(request_of, runner, run_dir):
    out = io.StringIO()

    assert launch(request_of(dry_run=True), out, runner) == 0

    assert runner.job is None
    assert out.getvalue().startswith("actors (")
    assert {"plan.json", "resolved.toml"} <= {path.name for path in run_dir.iterdir()}


def test_a_dry_run_without_a_run_folder_writes_nothing(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    flags = {"--model": config.model.path, "--dataset": config.data.path}
    out = io.StringIO()

    code = launch(
        Request(overrides=("queue.max_size_gb=1e9",), flags=flags, dry_run=True, as_json=True), out, None
    )

    assert code == 0
    assert json.loads(out.getvalue())["estimate"]["parameters"] == 1000
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr().err.startswith("warning: `queue.storage_path = /dev/shm` has ")


def test_a_live_display_and_tensorboard_can_be_asked_for(request_of, runner, run_dir):
    pytest.importorskip("tensorboard")

    assert launch(request_of(live=True, tensorboard=True), io.StringIO(), runner) == 0
    assert list((run_dir / "tensorboard").iterdir())


def test_what_actors_write_is_shown_between_the_events(request_of, runner):
    def write() -> None:
        runner.job.folder.log_path("rollout/0", 1).write_text("hello\n")

    runner.during = write
    out = io.StringIO()
    assert launch(request_of(tag_output=True), out, runner) == 0
    assert "rollout/0#1 │ hello\n" in out.getvalue()
    assert "step 1: reward 0.25" in out.getvalue()
