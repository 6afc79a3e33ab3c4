"""What is said of hosts on a command line becomes one record, or every reason why it cannot."""

import pytest

from launcher.asking import ask
from launcher.errors import RefusedError, report
from launcher.options import (
    GpuOptions,
    Launcher,
    Layout,
    NetworkOptions,
    Order,
    Picked,
    Preflight,
    Rehearsal,
    RemoteOptions,
    Selection,
    SlurmOptions,
    SshOptions,
)
from transport.ports import VARIABLE

INSIDE = {"SLURM_JOB_ID": "17"}


def asked(words: dict | None = None, environ: dict | None = None, *, has_srun: bool = False):
    return ask(words or {}, environ or {}, has_srun=has_srun)


def refused(words: dict, environ: dict | None = None, *, has_srun: bool = False) -> str:
    with pytest.raises(RefusedError) as caught:
        asked(words, environ, has_srun=has_srun)
    assert caught.value.exit_code == 2
    return report(caught.value)


def test_who_says_nothing_runs_here():
    options = asked()

    assert options.launcher is Launcher.LOCAL
    assert options.hosts == ()
    assert (options.preflight, options.rehearsal) == (Preflight.QUICK, Rehearsal.NO)


@pytest.mark.parametrize(
    ("words", "environ", "has_srun", "launcher"),
    [
        ({}, INSIDE, True, Launcher.SLURM),
        ({}, INSIDE, False, Launcher.LOCAL),
        ({}, {}, True, Launcher.LOCAL),
        ({"--hosts": "a"}, {}, False, Launcher.SSH),
        ({"--hosts": "a"}, INSIDE, True, Launcher.SLURM),
        ({"--hosts": "localhost:2"}, {}, False, Launcher.LOCAL),
        ({"--hosts": "me@localhost"}, {}, False, Launcher.SSH),
        ({"--slurm": True}, {}, False, Launcher.SLURM),
        ({"--launcher": "ssh", "--hosts": "a"}, INSIDE, True, Launcher.SSH),
        ({"--launcher": "ssh", "--hosts": "localhost"}, {}, False, Launcher.SSH),
        ({"--launcher": "local"}, INSIDE, True, Launcher.LOCAL),
        ({"--launcher": "auto"}, {}, False, Launcher.LOCAL),
    ],
)
def test_auto_is_slurm_in_an_allocation_ssh_for_other_hosts_and_local_otherwise(
    words, environ, has_srun, launcher
):
    assert asked(words, environ, has_srun=has_srun).launcher is launcher


def test_whether_slurm_is_here_is_looked_up(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask({}, INSIDE).launcher is Launcher.LOCAL

    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    assert ask({}, INSIDE).launcher is Launcher.SLURM


def test_everything_that_can_be_said_is_kept(tmp_path):
    hosts, key, setup = tmp_path / "hosts", tmp_path / "key", tmp_path / "setup.sh"
    hosts.write_text("node[1-4] slots=8\n")
    key.touch()
    setup.write_text("module load cuda\n")

    options = asked(
        {
            "--hostfile": str(hosts),
            "--include": "node[2-4]:0-3",
            "--num-nodes": "2",
            "--gpus-per-node": "auto",
            "--rollout-gpus": "7",
            "--train-gpus": "1",
            "--placement": "pack",
            "--ssh-port": "2222",
            "--user": "me",
            "--identity": str(key),
            "--ssh-opt": ("ProxyJump=gate",),
            "--fanout": "8",
            "--connect-timeout": "5",
            "--workdir": "/work/",
            "--venv": "/venv",
            "--setup": str(setup),
            "--env": ("A=1",),
            "--master-addr": "[fd00::1]",
            "--ifname": "eth0",
            "--port-range": "20000-29999",
            "--preflight": "full",
            "--dry-run": "remote",
            "--log-dir": "/logs",
        }
    )

    assert [(host.name, host.gpus) for host in options.hosts] == [
        ("node2", ("0", "1", "2", "3")),
        ("node3", ("0", "1", "2", "3")),
    ]
    picked = tuple(Picked(host=f"node{n}", gpus=("0", "1", "2", "3")) for n in (2, 3, 4))
    assert options.selection == Selection(include=picked, num_nodes=2)
    assert options.gpus == GpuOptions(order=Order.PACK, train=1, rollout=7)
    assert options.ssh == SshOptions(
        port=2222,
        user="me",
        identity=str(key),
        options=("ProxyJump=gate",),
        fanout=8,
        connect_timeout_s=5,
    )
    assert options.remote == RemoteOptions(
        workdir="/work",
        python="/venv/bin/python",
        setup="module load cuda\n",
        env=(("A", "1"), (VARIABLE, "20000-29999")),
    )
    assert options.network == NetworkOptions(master_addr="fd00::1", interface="eth0", ports=(20000, 29999))
    assert (options.preflight, options.rehearsal) == (Preflight.FULL, Rehearsal.REMOTE)
    assert options.log_dir == "/logs"


def test_a_job_to_submit_is_kept():
    options = asked(
        {
            "--slurm": True,
            "--nodes": "4",
            "--gpus-per-node": "8",
            "--partition": "gpu",
            "--account": "me",
            "--time": "1-12:00:00",
            "--sbatch-opt": ("qos=high", "exclusive"),
            "--requeue": True,
        }
    )

    assert options.slurm == SlurmOptions(
        submit=True,
        nodes=4,
        partition="gpu",
        account="me",
        time="1-12:00:00",
        options=("qos=high", "exclusive"),
        requeue=True,
    )
    assert options.selection.gpus_per_node == 8


def test_colocated_is_a_layout():
    assert asked({"--colocate": True, "--gpus": "4"}).gpus == GpuOptions(layout=Layout.COLOCATE, total=4)


def test_auto_is_what_nobody_said():
    words = {"--hosts": "a", "--master-addr": "auto", "--ifname": "auto", "--exclude": None}

    assert asked(words).network == NetworkOptions()


NASTY = ["a b", '"', "'", "$HOME", "`id`", ";", "a\nb", '{"a":1}', "%", "\N{ROCKET}", ""]


def test_values_of_variables_are_kept_byte_for_byte(tmp_path):
    given = tuple(f"G{index}={value}" for index, value in enumerate(NASTY))
    environ = {f"H{index}": value for index, value in enumerate(NASTY)}
    lines = [f"F{index}={value}" for index, value in enumerate(NASTY) if "\n" not in value]
    file = tmp_path / "env"
    file.write_text("# secrets\n\n" + "\r\n".join(lines), newline="")

    env = dict(asked({"--env": (*given, *environ), "--env-file": str(file)}, environ).remote.env)

    for index, value in enumerate(NASTY):
        assert env[f"G{index}"] == env[f"H{index}"] == value
        assert env.get(f"F{index}", value) == value
    assert len(env) == 3 * len(NASTY) - 1


def test_what_is_given_wins_over_the_file_and_bytes_that_are_no_text_survive(tmp_path):
    file = tmp_path / "env"
    file.write_bytes(b"A=1\nB=\xff\n")

    env = dict(asked({"--env": ("A=2",), "--env-file": str(file)}).remote.env)

    assert env == {"A": "2", "B": "\udcff"}


def test_values_of_variables_are_not_shown():
    remote = asked({"--env": ("TOKEN=secret",), "--hosts": "a", "--workdir": "/w"}).remote

    assert repr(remote) == "RemoteOptions(workdir='/w', python='', env=[TOKEN])"


FAR = {"--hosts": "a:8,b:8"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            {"--hosts": "a", "--hostfile": "f"},
            ("`--hosts` is given beside --hostfile\n\nhint: leave one out; --include picks from a file"),
        ),
        (
            {"--hostfile": "/nowhere/hosts"},
            (
                "`/nowhere/hosts` is no hostfile: it does not exist\n\n"
                "hint: nothing is launched without it: give another -H, "
                "or leave it out to run on this host alone"
            ),
        ),
        (
            FAR | {"--include": "a", "--exclude": "b"},
            ("`--exclude` is given beside --include\n\nhint: leave one out"),
        ),
        (
            FAR | {"--include": "c"},
            ("`--include` names c, which is not among the hosts\n\nhint: the hosts are a,b"),
        ),
        (
            FAR | {"--include": "a:x"},
            (
                "`--include` has `x` where a GPU stands\n  a:x\n    ^\n\n"
                "hint: indices such as 0,2,4-7, or UUIDs as `nvidia-smi -L` prints them"
            ),
        ),
        (FAR | {"--num-nodes": "0"}, "`--num-nodes` must be a whole number from 1 to 65536, got `0`"),
        (
            FAR | {"--gpus-per-node": "many"},
            "`--gpus-per-node` must be a whole number from 1 to 1024, got `many`",
        ),
        (
            {"--launcher": "slrm"},
            (
                "`--launcher` must be one of `auto`, `local`, `ssh`, `slurm`, got `slrm`\n\n"
                "hint: did you mean `slurm`?"
            ),
        ),
        ({"--launcher": "k8s"}, "`--launcher` must be one of `auto`, `local`, `ssh`, `slurm`, got `k8s`"),
        (
            FAR | {"--launcher": "local"},
            ("`--launcher` is local, but a is another host\n\nhint: use ssh, or auto"),
        ),
        (
            {"--launcher": "ssh"},
            ("`--launcher` is ssh, but no host is named\n\nhint: give -H FILE or --hosts a:8,b:8"),
        ),
        (
            {"--launcher": "slurm"},
            (
                "`--launcher` is slurm, but this is no allocation (SLURM_JOB_ID or srun is missing)\n\n"
                "hint: run it inside salloc or sbatch, or give --slurm to submit a job"
            ),
        ),
        (
            FAR | {"--launcher": "ssh", "--slurm": True},
            ("`--slurm` submits a job, but --launcher is ssh\n\nhint: leave --launcher out"),
        ),
        (
            {"--gpus": "8", "--train-gpus": "1"},
            ("`--gpus` is given beside --train-gpus or --rollout-gpus\n\nhint: leave it out"),
        ),
        (
            {"--colocate": True, "--rollout-gpus": "1"},
            (
                "`--rollout-gpus` has no meaning with --mode colocate, where both use all\n\n"
                "hint: use --gpus N"
            ),
        ),
        ({"--placement": "tight"}, "`--placement` must be one of `pack`, `spread`, got `tight`"),
        (FAR | {"--ssh-port": "ssh"}, "`--ssh-port` must be a whole number from 1 to 65535, got `ssh`"),
        (
            FAR | {"--ssh-opt": ("ProxyJump",)},
            (
                "`--ssh-opt` must be KEY=VALUE, got `ProxyJump`\n\n"
                "hint: as in `man ssh_config`: ProxyJump=gate"
            ),
        ),
        (FAR | {"--identity": "/nowhere/key"}, "`--identity` is no file: /nowhere/key"),
        (FAR | {"--user": "-l"}, "`--user` `-l` is not the name of a user"),
        (FAR | {"--workdir": "here"}, "`--workdir` must be an absolute path on the hosts, got `here`"),
        (
            FAR | {"--venv": "/v", "--remote-python": "/p"},
            ("`--venv` is given beside --remote-python\n\nhint: leave one out"),
        ),
        (FAR | {"--setup": "/nowhere/s"}, "`--setup` cannot be read: no such file or directory: /nowhere/s"),
        ({"--env": ("1A=2",)}, "`-x` must be NAME or NAME=VALUE; a name has letters, digits and `_`"),
        (
            {"--env": ("TOKEN",)},
            ("`-x TOKEN` is not set here\n\nhint: export TOKEN first, or give -x TOKEN=VALUE"),
        ),
        (FAR | {"--master-addr": "1.2.3"}, "`--master-addr` has `1.2.3`, which is no IPv4 address"),
        (FAR | {"--ifname": ""}, "`--ifname` `` is not the name of a network interface"),
        (
            FAR | {"--port-range": "9-5"},
            ("`--port-range` must be FIRST-LAST, from 1024 to 65535, got `9-5`\n\nhint: 20000-29999"),
        ),
        (
            {"--slurm": True, "--sbatch-opt": ("--qos",)},
            ("`--sbatch-opt` must be KEY or KEY=VALUE, got `--qos`\n\nhint: for example qos=high"),
        ),
        ({"--slurm": True, "--time": "1 day"}, "`--time` must be one word, got `1 day`"),
        ({"--requeue": True}, "`--requeue` is for a job that is submitted\n\nhint: give --slurm, too"),
        (
            {"--venv": "/v"},
            ("`--venv` is for other hosts, and none is named\n\nhint: give -H FILE or --hosts a:8,b:8"),
        ),
        (
            {"--slurm": True, "--fanout": "8"},
            ("`--fanout` is for ssh, but Slurm starts the agents\n\nhint: leave it out, or --launcher ssh"),
        ),
        (
            {"--num-nodes": "2"},
            ("`--num-nodes` picks from hosts, and none is named\n\nhint: give -H FILE or --hosts a:8,b:8"),
        ),
        (
            {"--preflight": "ful"},
            ("`--preflight` must be one of `full`, `quick`, `off`, got `ful`\n\nhint: did you mean `full`?"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_with_a_hint(words, error):
    assert refused(words) == f"error: {error}"


def test_a_job_cannot_be_submitted_from_inside_of_one():
    assert refused({"--slurm": True}, INSIDE, has_srun=True) == (
        "error: `--slurm` submits a job, but this is allocation 17 already\n\nhint: leave --slurm out"
    )


def test_everything_that_is_wrong_is_said_at_once():
    text = refused({"--hosts": "a:x", "--fanout": "0", "--env": ("B",)})

    assert [line.split("`")[1] for line in text.split("\n") if line.startswith("error")] == [
        "--hosts",
        "--fanout",
        "-x B",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b"export A=1\n",
            (
                "`{}:1` has no variable\n\n"
                "hint: a line is NAME=VALUE, without `export`; all behind the first `=` is the value"
            ),
        ),
        (
            b"\nA\n",
            (
                "`{}:2` has no variable\n\n"
                "hint: a line is NAME=VALUE, without `export`; all behind the first `=` is the value"
            ),
        ),
        (b"A=\0\n", "`{}:1` has a zero byte in the value of A"),
    ],
)
def test_a_file_of_variables_has_one_a_line(tmp_path, content, problem):
    file = tmp_path / "env"
    file.write_bytes(content)

    assert refused({"--env-file": str(file)}) == f"error: {problem.format(file)}"
