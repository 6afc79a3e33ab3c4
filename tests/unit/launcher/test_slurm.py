"""Slurm without a Slurm: batch scripts, the words of a job, node lists, GPUs, and what is complained of."""

import io
import os
import signal
import subprocess
from pathlib import Path

import pytest
from watching import eventually

from launcher.hosts import HostEntry
from launcher.interrupts import ECHO_S, Signals
from launcher.options import Launcher, LaunchOptions, NetworkOptions, RemoteOptions, Selection, SlurmOptions
from launcher.runfolder import RunFolder
from launcher.selecting import SelectionError
from launcher.slurm import head_argv, sbatch
from launcher.slurm_hosts import (
    Allocation,
    allocation,
    gpus_of,
    hosts_of,
    in_allocation,
    parse_addresses,
    parse_survey,
    problem_of,
    run_slurm,
    step,
    survey,
)
from launcher.slurm_submit import outside, prepare_job, submit
from launcher.slurm_words import SlurmError, fact_of, hint_of

FULL = LaunchOptions(
    launcher=Launcher.SLURM,
    selection=Selection(gpus_per_node=8),
    slurm=SlurmOptions(
        submit=True,
        nodes=4,
        partition="gpu",
        account="lab",
        time="1-00:00:00",
        options=("qos=high", "exclusive", "comment=two words"),
        requeue=True,
    ),
)

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=spell
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --time=1-00:00:00
#SBATCH --output=/runs/a/slurm-%j.out --open-mode=append
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --qos=high --exclusive --comment="two words"

attempt=/runs/a/attempt_${SLURM_RESTART_COUNT:-0}
mkdir -p "$attempt"
trap 'kill -USR2 $!' USR2  # the time is almost over: keep a checkpoint and leave
trap 'kill -TERM $!' TERM
relax-actor launch run.toml >>"$attempt/head.log" 2>&1 &
head=$!
while kill -0 $head 2>/dev/null; do wait $head; done
wait $head; code=$?
[ $code -eq 140 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


def test_the_batch_script_with_everything_in_it_has_at_most_25_lines():
    script = sbatch(FULL, ["relax-actor", "launch", "run.toml"], name="spell", folder="/runs/a")
    assert script == SCRIPT
    assert len(script.splitlines()) <= 25


def test_what_nobody_said_is_left_to_sbatch():
    script = sbatch(LaunchOptions(), ["relax-actor"], name="a b", folder="/runs/x y%")
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="a b"',
        "#SBATCH --ntasks-per-node=1",
        '#SBATCH --output="/runs/x y%%/slurm-%j.out" --open-mode=append',
        "#SBATCH --signal=B:USR2@180",
        "#SBATCH --no-kill",
        "#SBATCH --no-requeue",
    ]
    assert "attempt='/runs/x y%'/attempt_" in script
    assert "scontrol" not in script


@pytest.mark.parametrize(
    ("ends", "requeued"), [("exit 3", ""), ("trap 'exit 140' USR2; kill -USR2 $$", "7\n")]
)
def test_the_batch_script_leaves_with_the_heads_code_and_requeues_the_preempted(tmp_path, ends, requeued):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "scontrol").write_text(f'#!/bin/sh\necho "$2" > {tmp_path}/requeued\n')
    (fake / "scontrol").chmod(0o755)
    script = tmp_path / "job"
    script.write_text(sbatch(FULL, ["sh", "-c", ends], name="a", folder=str(tmp_path)))
    env = {"PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(script)], env=env, check=False)
    assert done.returncode == (140 if requeued else 3)
    assert not requeued or (tmp_path / "requeued").read_text() == requeued
    assert (tmp_path / "attempt_0" / "head.log").exists()


def test_signals_of_the_batch_shell_reach_the_head_which_it_outlives(tmp_path):
    head = f"trap 'echo usr2 >> {tmp_path}/said' USR2; trap 'exit 143' TERM; touch {tmp_path}/up; "
    script = tmp_path / "job"
    command = ["bash", "-c", head + "while :; do sleep 0.01; done"]
    script.write_text(sbatch(FULL, command, name="a", folder=str(tmp_path)))
    shell = subprocess.Popen(["bash", str(script)])
    wait_for(tmp_path / "up")
    shell.send_signal(signal.SIGUSR2)
    wait_for(tmp_path / "said")
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(60) == 143


def test_a_signal_that_comes_as_soon_as_the_head_is_there_reaches_it(tmp_path):
    slowly = tmp_path / "slowly"
    slowly.write_text("trap 'sleep 0.3' DEBUG\n")  # before each command of the batch shell
    head = f"trap 'echo usr2 >{tmp_path}/said; exit 3' USR2; kill -USR2 $PPID; while :; do sleep 0.01; done"
    script = tmp_path / "job"
    script.write_text(sbatch(FULL, ["sh", "-c", head], name="a", folder=str(tmp_path)))
    env = os.environ | {"BASH_ENV": str(slowly)}
    done = subprocess.run(["bash", str(script)], env=env, check=False, timeout=60)
    assert (done.returncode, (tmp_path / "said").exists()) == (3, True)


def wait_for(path: Path) -> None:
    eventually(path.exists, 60.0)


def test_a_job_says_the_words_again_but_those_of_the_submission():
    words = ["run.toml", "--slurm", "--nodes", "4", "--time=1:00", "--sbatch_opt", "qos=x", "--requeue"]
    words += ["-H", "hosts", "--steps", "9", "--run-dir", "old", "--resume=none", "--dry-run", "a.b=1"]
    argv, env = head_argv(words, folder="/runs/a")
    said = ["run.toml", "-H", "hosts", "--steps", "9", "a.b=1"]
    assert argv == [*said, "--launcher", "slurm", "--run-dir", "/runs/a", "--resume", "auto"]
    assert env == {}


def test_values_of_variables_are_in_the_environment_and_not_in_the_script():
    job = prepare_job(
        FULL, ["-x", "A=s3cret $x", "-xB=s3cret", "--env=C=", "-x", "D"], name="a", folder=Path("/runs/a")
    )
    assert job.env == {"A": "s3cret $x", "B": "s3cret", "C": ""}
    assert "s3cret" not in job.script
    assert "-x A -x B --env C -x D" in job.script


def test_an_environment_does_not_overrule_the_script():
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "c",
        "SBATCH_TIMELIMIT": "9",
        "SBATCH_QOS": "q",
        "PATH": "p",
    }
    assert outside(environ, SCRIPT) == {"SLURM_CONF": "c", "PATH": "p"}
    assert outside(environ, "#!/bin/sh\n") == {
        "SLURM_CONF": "c",
        "SBATCH_TIMELIMIT": "9",
        "SBATCH_QOS": "q",
        "PATH": "p",
    }


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Put commands of Slurm on the PATH that say what a test wants."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def command(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return command


def test_a_submitted_job_is_named_with_what_to_do_next(tmp_path, commands):
    commands("sbatch", f"echo \"$A\" > {tmp_path}/a; echo '42;cluster'")
    folder, out = RunFolder.create(str(tmp_path / "run"), name=""), io.StringIO()
    job = prepare_job(FULL, ["-x", "A=one\ntwo"], name="a", folder=folder.path)
    assert submit(job, folder, out) == "42"
    assert (folder.path / "job.sbatch").read_text() == job.script
    assert (tmp_path / "a").read_text() == "one\ntwo\n"
    assert "scancel 42" in out.getvalue()


def test_a_job_that_sbatch_refuses_says_why(tmp_path, commands):
    commands("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    folder = RunFolder.create(str(tmp_path / "run"), name="")
    with pytest.raises(SlurmError) as caught:
        submit(prepare_job(FULL, [], name="a", folder=folder.path), folder, io.StringIO())
    expected = (
        "`sbatch`: invalid partition specified: x\n\nhint: `sinfo -s` shows the partitions; see --partition"
    )
    assert str(caught.value) == expected


def test_without_slurm_there_is_nothing_to_submit_with(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunFolder.create(str(tmp_path / "run"), name="")
    with pytest.raises(SlurmError, match="`sbatch`: is not on the PATH"):
        submit(prepare_job(FULL, [], name="a", folder=folder.path), folder, io.StringIO())
    with pytest.raises(SlurmError, match="`srun`: is not on the PATH"):
        run_slurm(["srun"])


def test_a_command_that_fails_without_a_word_is_told_by_its_exit_code(commands):
    commands("srun", "exit 9")
    with pytest.raises(SlurmError, match="ended with exit code 9"):
        run_slurm(["srun"])


def test_what_takes_too_long_is_given_up(tmp_path, commands, monkeypatch):
    monkeypatch.setattr("launcher.slurm_submit.SUBMIT_S", 0.05)
    monkeypatch.setattr("launcher.slurm_hosts.SURVEY_S", 0.05)
    commands("sbatch", "exec sleep 5")
    commands("srun", "exec sleep 5")
    folder = RunFolder.create(str(tmp_path / "run"), name="")
    with pytest.raises(SlurmError, match=r"had not ended after 0\.05 s"):
        submit(prepare_job(FULL, [], name="a", folder=folder.path), folder, io.StringIO())
    with pytest.raises(SlurmError, match=r"had not ended after 0\.05 s"):
        run_slurm(["srun"])


# What a real Slurm 22.05 has said, and a word of the hint for it.
SAID = [
    ("sbatch: error: Batch job submission failed: Invalid partition name specified", "--partition"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "no node"),
    ("sbatch: error: Invalid generic resource (gres) specification", "--gpus-per-node"),
    ("sbatch: error: Invalid --time specification", "DAYS-HOURS"),
    ("sbatch: unrecognized option '--x=2'\nTry \"sbatch --help\" for more information", "sbatch --help"),
    ("sbatch: error: Memory specification can not be satisfied", "mem="),
    ("sbatch: error: Batch job submission failed: Requested reservation is invalid", "reservation"),
    ("sbatch: error: Batch job submission failed: Invalid feature specification", "constraint"),
    ("sbatch: error: Batch job submission failed: Invalid node name specified", "sinfo -N"),
    (
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination",
        "sacctmgr",
    ),
    ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "qos"),
    ("srun: error: Only allocated 2 nodes asked for 3", "fewer --nodes"),
    ("srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 9999", "allocation is over"),
    ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", "scontrol ping"),
    ("slurmstepd-n2: error: execve(): /no/python: No such file or directory", "--venv"),
    ("srun: error: Munge encode failed", "munge"),
    ("srun: error: Node failure on n2", "sinfo -R"),
]


@pytest.mark.parametrize(("said", "hint"), SAID)
def test_what_slurm_complains_of_has_a_hint(said, hint):
    assert hint in hint_of(said)


def test_a_complaint_is_told_in_one_line():
    said = (
        "srun: cluster configuration lacks support for cpu binding\nsrun: error: a\nsrun: error: b\nsrun: c\n"
    )
    assert fact_of(said) == "b; c"
    assert fact_of("\n") == "it said nothing"
    assert str(SlurmError("srun", "srun: something new")) == "`srun`: something new"
    assert str(problem_of("n2", "srun: error: Node failure on n2", "")).startswith(
        "`srun to n2`: Node failure"
    )


def test_node_lists_are_expanded_without_scontrol(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[08-10],gpu1", "SLURMD_NODENAME": "n09"}
    assert allocation(environ) == Allocation(job_id="5", nodes=("n08", "n09", "n10", "gpu1"), here="n09")
    assert allocation(environ | {"SLURMD_NODENAME": "login"}).here == ""
    with pytest.raises(SlurmError, match="SLURM_JOB_NODELIST"):
        allocation({"SLURM_JOB_ID": "5"})


def test_where_there_is_scontrol_it_expands(commands):
    commands("scontrol", 'test "$*" = "show hostnames x" && echo a && echo b')
    assert allocation({"SLURM_JOB_NODELIST": "x"}).nodes == ("a", "b")


TWO = Allocation(job_id="5", nodes=("n1", "n2"), here="n1")
LINES = "noise\nrelax-actor\tSLURMD_NODENAME=n1\tCUDA_VISIBLE_DEVICES=GPU-a,GPU-b\r\n"
SECOND = "relax-actor\tSLURMD_NODENAME=n2\tSLURM_GPUS_ON_NODE=2\n"
NODES = "NodeName=n1 Arch=x NodeAddr=127.0.0.1 NodeHostName=h\nNodeName=n2 Arch=x NodeAddr=(null) Y=1\n"


def test_hosts_are_asked_again_until_all_have_answered():
    said = iter([LINES, SECOND, NODES])
    first, second = survey(TWO, lambda _: next(said))
    assert (first.name, first.address, first.gpus) == ("n1", "127.0.0.1", ("GPU-a", "GPU-b"))
    assert (second.name, second.address, second.gpus) == ("n2", "n2", ("0", "1"))


def test_a_host_that_never_answers_is_named():
    with pytest.raises(SlurmError, match="n2 did not answer"):
        survey(TWO, lambda _: LINES)


def test_what_is_no_answer_does_not_count():
    assert parse_survey("relax-actor\tA=1\nother\tSLURMD_NODENAME=n1\n") == {}
    assert parse_addresses("nothing") == {}


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "4,5"}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, ("MIG-1", "MIG-2")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"SLURM_STEP_GPUS": "4-6"}, ("4", "5", "6")),
        ({"SLURM_JOB_GPUS": "1"}, ("1",)),
        ({"SLURM_GPUS_ON_NODE": "2"}, ("0", "1")),
    ],
)
def test_gpus_are_named_as_the_task_sees_them(environ, gpus):
    assert gpus_of(environ) == gpus


def test_an_agent_is_the_only_task_of_a_step_of_its_own():
    words = step("n2", TWO)
    assert words[:3] == ("env", "SLURM_EXIT_ERROR=255", "srun")
    assert {"--jobid=5", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap", "--unbuffered"} <= set(
        words
    )


def options_for(*names: str, **fields: object) -> LaunchOptions:
    entries = tuple(HostEntry(name=name, address="127.0.0.1") for name in names)
    return LaunchOptions(launcher=Launcher.SLURM, hosts=entries, **fields)


def test_the_heads_own_node_needs_no_step(tmp_path):
    remote = RemoteOptions(python="/venv/bin/python", env=(("A", "b"),))
    environ: dict[str, str] = {}
    (own, other), head = hosts_of(options_for("n1", "n2", remote=remote), TWO, tmp_path, environ)
    assert (own.prefix, own.python, own.run_dir) == ((), "", "")
    assert own.session.env == other.session.env == ((b"A", b"b"),)
    assert (other.prefix, other.python) == (step("n2", TWO), "/venv/bin/python")
    assert (other.run_dir, other.address, head) == (str(tmp_path / "hosts" / "n2"), "127.0.0.1", "127.0.0.1")
    assert own.term_is_for_head
    assert "n2" in environ["no_proxy"]


def test_an_allocation_of_one_node_needs_no_network(tmp_path):
    (own,), head = hosts_of(options_for("n1"), TWO, tmp_path, {})
    assert (own.name, head) == ("n1", "127.0.0.1")
    network = NetworkOptions(master_addr="10.0.0.1", interface="eth7")
    environ: dict[str, str] = {}
    _, head = hosts_of(options_for("n1", network=network), TWO, tmp_path, environ)
    assert (head, environ["NCCL_SOCKET_IFNAME"]) == ("10.0.0.1", "eth7")


def test_a_rehearsal_asks_no_host(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-3]"}
    options = LaunchOptions(launcher=Launcher.SLURM, selection=Selection(num_nodes=2))
    found = in_allocation(options, environ, rehearse=True)
    assert [host.name for host in found.hosts] == ["n1", "n2"]
    assert in_allocation(LaunchOptions(), environ) == LaunchOptions()
    assert in_allocation(FULL, environ) == FULL


def test_a_hostfile_is_a_filter_of_the_allocation(commands):
    commands("scontrol", f'case "$2" in hostnames) echo n1; echo n2;; *) printf "{NODES}";; esac')
    commands("srun", f"printf '{LINES}{SECOND}'")
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]"}
    named = LaunchOptions(launcher=Launcher.SLURM, hosts=(HostEntry(name="n2"),))
    [only] = in_allocation(named, environ).hosts
    assert (only.name, only.gpus) == ("n2", ("0", "1"))
    foreign = LaunchOptions(launcher=Launcher.SLURM, hosts=(HostEntry(name="n9", where="hosts:1:1"),))
    with pytest.raises(SelectionError, match="n9"):
        in_allocation(foreign, environ)


class Told:
    """A control that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def preempt(self, reason: str) -> None:
        self.told.append(f"preempt {reason}")

    def stop(self, reason: str) -> None:
        self.told.append(f"stop {reason}")

    def kill(self, reason: str) -> None:
        self.told.append(f"kill {reason}")


def test_a_warning_preempts_once_and_does_not_count_as_the_first_signal():
    control, signals = Told(), Signals()
    signals.obey(control)
    for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGINT, signal.SIGUSR2, signal.SIGINT):
        signals.handle(number, None)
    assert control.told == ["preempt SIGUSR2", "stop SIGINT", "kill SIGINT"]


def test_a_warning_that_comes_early_is_passed_on_when_there_is_a_tree():
    control, signals = Told(), Signals()
    signals.handle(signal.SIGUSR2, None)
    signals.obey(control)
    assert control.told == ["preempt SIGUSR2"]


def test_a_term_that_comes_twice_at_once_is_one(monkeypatch):
    control, signals = Told(), Signals()
    signals.obey(control)
    now_s = [100.0]
    monkeypatch.setattr("launcher.interrupts.time.monotonic", lambda: now_s[0])
    signals.handle(signal.SIGTERM, None)
    signals.handle(signal.SIGTERM, None)
    assert control.told == ["stop SIGTERM"]
    now_s[0] += ECHO_S
    signals.handle(signal.SIGTERM, None)
    assert control.told == ["stop SIGTERM", "kill SIGTERM"]
