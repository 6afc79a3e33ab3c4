"""The command line says what it does, quickly, and what is wrong, exactly."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest

from launcher import cli
from launcher.cli import main
from launcher.cli_options import divided
from launcher.fields import SECTIONS, wanted
from launcher.runfolder import RunFolder
from launcher.settings import load
from relax_actor.errors import DatasetError

DOCS = Path(__file__).parents[3] / "docs" / "reference"
HEAVY = ("torch", "transformers", "matplotlib", "rich", "tensorboard", "pebble")


@pytest.fixture
def relax(capsys, monkeypatch):
    """Run a command line; return exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


SEEING = ["status", "ps", "tree", "top", "why", "stack", "events", "dead-letters", "logs"]
DCS = ["dcs ls", "dcs verify", "dcs export"]
GROUPS = ["", "dcs"]
COMMANDS = ["launch", "plan", "doctor", *SEEING, "stop", "kill", "scale", *DCS]
SECTIONS_OF_HELP = ["Options", "Hosts", "GPUs", "Ssh", "Environment of actors", "Network", "Slurm"]


@pytest.mark.parametrize("command", [*GROUPS, *COMMANDS, "completion"])
def test_help_is_what_the_reference_says(relax, command):
    code, text, _ = relax(*command.split(), "--help")

    heading = f"## relax-actor {command}".rstrip()
    page = (DOCS / "cli.md").read_text()
    (documented,) = re.findall(re.escape(heading) + r"\n\n```text\n(.*?)\n```", page, re.DOTALL)
    assert (code, text.strip()) == (0, documented)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_opens_with_a_sentence_then_an_example_then_options(relax, command):
    text = relax(*command.split(), "-h")[1]
    sentence, example, options = (
        text.index("."),
        text.index(f"relax-actor {command} run"),
        text.index("Options:"),
    )

    assert sentence < example < options < text.index("Exit status:")


@pytest.mark.parametrize("command", ["launch", "plan", "doctor"])
def test_options_of_a_launch_are_in_sections(relax, command):
    text = relax(command, "--help")[1]

    assert re.findall(r"^([A-Z][A-Za-z ]+):$", text, re.MULTILINE) == SECTIONS_OF_HELP


def test_every_setting_is_in_the_reference():
    page = (DOCS / "config.md").read_text()
    for section, fields in SECTIONS.items():
        part = page.partition(f"## [{section}]")[2].partition("\n## ")[0]
        for key, field in fields.items():
            made = field.default_factory
            value = field.default if made is msgspec.NODEFAULT else made()
            default = "required" if value is msgspec.NODEFAULT else f"`{json.dumps(value)}`"
            assert f"| `{key}` | {wanted(field.type)} | {default} |" in part, f"{section}.{key}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["launch", "--help"],
        ["plan", "nothing.toml"],
        *([name, "/nowhere", "x"] for name in SEEING),
        *([*name.split(), "/nowhere"] for name in DCS),
    ],
    ids=" ".join,
)
def test_help_and_errors_come_without_heavy_imports(arguments):
    _, heavy = end_and_imports(arguments)
    assert heavy == "[]"


def test_a_plan_comes_without_heavy_imports(config):
    arguments = ["plan", "--model", config.model.path, "--dataset", config.data.path]
    assert end_and_imports(arguments) == ("0", "[]")


def end_and_imports(arguments):
    """Run the command in a fresh interpreter; return its exit code and the heavy modules it imported."""
    code = (
        "import sys\nfrom launcher.cli import main\n"
        f"try: main({arguments})\n"
        f"except SystemExit as end: print(end.code, [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    code, _, heavy = done.stdout.splitlines()[-1].partition(" ")
    return code, heavy


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["launch", "--stesp", "3"],
            "error: `--stesp` is not an option\n\nhint: did you mean --steps?\n",
        ),
        (
            ["status"],
            "error: missing argument 'RUN'\n\nhint: relax-actor status --help shows what there is\n",
        ),
        (
            ["lunch"],
            "error: no such command 'lunch'\n\nhint: did you mean 'launch'?\n",
        ),
        (
            ["zzz"],
            "error: no such command 'zzz'\n\nhint: relax-actor --help shows what there is\n",
        ),
        (
            ["stop", "--zzz"],
            "error: `--zzz` is not an option\n\nhint: relax-actor stop --help shows what there is\n",
        ),
        (
            ["plan", "zzz.toml", "run.stpes=3"],
            (
                "error: `zzz.toml` does not exist\n\n"
                "error: `run.stpes` is not a setting\n\nhint: did you mean `run.steps`?\n"
            ),
        ),
        (
            ["plan", "--mode", "on_policy", "--model", "/m", "--dataset", "/d"],
            (
                'error: `--mode` must be one of `async_on_policy`, `async_off_policy`, got "on_policy"\n\n'
                "hint: did you mean `async_on_policy`?\n"
            ),
        ),
        (
            ["launch", "--dry-run=far"],
            (
                "error: `--dry-run` is local or remote, got `far`\n\n"
                "hint: relax-actor launch --help shows what there is\n"
            ),
        ),
        (
            ["launch", "--json"],
            (
                "error: `--json` prints the plan of a dry run: give --dry-run, too\n\n"
                "hint: relax-actor launch --help shows what there is\n"
            ),
        ),
        (
            ["completion", "tcsh"],
            (
                "error: invalid value for SHELL: `tcsh` is not one of bash, zsh, fish\n\n"
                "hint: relax-actor completion --help shows what there is\n"
            ),
        ),
        (
            ["stop", "/nowhere/at/all"],
            "error: `/nowhere/at/all` is not a run folder\n\nhint: a run folder has an events.jsonl\n",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_error_states_the_fact_and_after_a_blank_line_a_hint(
    relax, tmp_path, monkeypatch, arguments, error
):
    monkeypatch.chdir(tmp_path)

    assert relax(*arguments) == (2, "", error)


def test_options_take_underscores_and_dashes(relax, config):
    common = ["--model", config.model.path, "--dataset", config.data.path, "--json"]
    for option in ("--global-batch-size", "--global_batch_size"):
        code, out, _ = relax("plan", *common, option, "16", "run.max-staleness=2")
        plan = json.loads(out)
        assert (code, plan["samples_per_step"], plan["staleness_bound_samples"]) == (0, 16, 48)


def test_a_dry_run_of_launch_is_a_plan(relax, config, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{config.model.path}"\n[data]\npath = "{config.data.path}"\n')

    code, out, _ = relax("launch", file, "--dry_run", "--steps", "3")

    assert code == 0
    assert "  steps        3, over 4 prompts an epoch" in out


@pytest.mark.parametrize("option", ["--dry-run", "--dry_run", "--dry-run=local", "--dry-run=remote"])
def test_a_dry_run_may_ask_the_hosts_or_not(relax, config, monkeypatch, option):
    seen = []
    monkeypatch.setattr("launcher.launch.launch", lambda request, _: seen.append(request) or 0)

    assert relax("launch", "run.toml", option, "--model", "m", "a.b=c")[0] == 0

    (request,) = seen
    assert (request.config_path, request.overrides) == (Path("run.toml"), ("a.b=c",))
    assert request.dry_run
    assert request.words["--dry-run"] == ("remote" if option.endswith("remote") else "local")


def test_colocate_is_on_policy_on_the_same_gpus(relax, config):
    common = ["--model", config.model.path, "--dataset", config.data.path, "--json"]

    plan = json.loads(relax("plan", *common, "--mode", "colocate", "--gpus", "2", "--hosts", "a:2")[1])

    assert (plan["mode"], plan["max_staleness"]) == ("async_on_policy", 0)
    assert plan["hosts"]["hosts"][0]["actor_gpus"] == {
        "rollout/0": ["0"],
        "rollout/1": ["1"],
        "trainer": ["0"],
    }


def test_colocate_takes_turns():
    flags, words = divided({"mode": "colocate", "model": "m", "partial_rollout": False})
    assert load(None, ["data.path=d"], flags).run.colocate
    assert words["--colocate"]
    flags, _ = divided({"mode": "async_on_policy", "model": "m", "partial_rollout": False})
    assert not load(None, ["data.path=d"], flags).run.colocate


def test_partial_rollout_does_not_overrule_a_number(relax, config, tmp_path):
    common = ["plan", "--model", config.model.path, "--dataset", config.data.path]
    for overrides, tokens in (([], 256), (["rollout.chunk_tokens=64"], 64)):
        folder = tmp_path / str(tokens)
        relax(*common, "--partial-rollout", "--grace", "5", "--run-dir", str(folder), *overrides)
        text = (folder / "resolved.toml").read_text()
        assert f"chunk_tokens = {tokens}\n" in text
        assert "grace_s = 5.0\n" in text


def test_what_is_wrong_with_hosts_is_said_beside_what_is_wrong_with_settings(relax, tmp_path):
    code, out, error = relax("plan", "--steps", "x", "-H", tmp_path / "none")

    assert (code, out) == (2, "")
    assert error.startswith("error: `--steps` must be a whole number")
    assert f"error: `{tmp_path / 'none'}` is no hostfile: it does not exist" in error


def test_a_plan_that_does_not_fit_names_who_has_no_place(relax, config):
    common = ["plan", "--model", config.model.path, "--dataset", config.data.path]

    assert relax(*common, "--hosts", "a:1,b:1", "--rollout-gpus", "2") == (
        2,
        "",
        (
            "error: `rollout/1` needs 1 GPU of one host; none is free\n\n"
            "hint: lower rollout.replicas (now 2) or rollout.tensor_parallel, or add hosts\n"
        ),
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_what_completes_the_command_line(relax, shell):
    code, script, error = relax("completion", shell)

    assert (code, error) == (0, "")
    assert f"_RELAX_ACTOR_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("relax-actor la", {"launch"}),
        ("relax-actor launch --launcher s", {"ssh", "slurm"}),
        ("relax-actor launch --hostf", {"--hostfile"}),
        ("relax-actor plan --mode c", {"colocate"}),
    ],
)
def test_a_shell_completes_commands_options_and_words(typed, completed):
    words = typed.split()
    env = {
        "PATH": "",
        "_RELAX_ACTOR_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }

    done = subprocess.run(
        [sys.executable, "-c", "from launcher.cli import main; main()"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=env,
    )

    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == completed


def test_help_and_the_plan_of_a_thousand_hosts_are_quick(config, tmp_path):
    """In function calls, which other processes do not make more: a million of them take about 0.3 s."""
    (tmp_path / "hosts").write_text("node[0001-1000] slots=8\n")
    common = ["--model", config.model.path, "--dataset", config.data.path]
    plan = ["plan", *common, "-H", str(tmp_path / "hosts"), "--rollout-gpus", "7999"]
    for arguments, most_calls in ((["launch", "--help"], 600_000), (plan, 3_000_000)):
        code = "import itertools, sys\ncalls = itertools.count()\nsys.setprofile(lambda *_: next(calls))\n"
        code += f"from launcher.cli import main\ntry: main({arguments})\n"
        code += "except SystemExit as end: sys.stderr.write(f'{end.code} {next(calls) // 2}')"  # and returns

        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
        )

        exit_code, calls = map(int, done.stderr.split())
        assert exit_code == 0
        assert calls < most_calls
    assert "node[0002-1000]  0-7   rollout/[7-7998]" in done.stdout


def test_status_logs_and_stop_work_on_a_folder(relax, tmp_path, story, log_of):
    folder = RunFolder.create(str(tmp_path / "run"), name="x")
    log_of(folder.events, *story)
    folder.log_path("trainer", 1).write_text("hello\n")

    assert "rollout/0" in relax("status", folder.path)[1]
    assert json.loads(relax("status", folder.path, "--json")[1])["restarts"] == 1
    assert relax("status", folder.path, "--follow")[0] == 0
    assert relax("logs", folder.path, "trainer", "-n", "5")[1] == "trainer#1 │ hello\n"
    assert relax("stop", folder.path) == (0, f"`{folder.path}` is not running\n", "")


def test_every_command_that_looks_into_a_run_works_on_its_folder_alone(relax, tmp_path, happened):
    folder = RunFolder.create(str(tmp_path / "run"), name="x")
    happened.start("queue")
    happened.end("queue", "SIGKILL", "signal", signal=9)
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in happened.events))

    assert json.loads(relax("ps", folder.path, "--json")[1])[0]["last_exit"] == "SIGKILL"
    assert "└─ rollouts" in relax("tree", folder.path)[1]
    assert "queue" in relax("top", folder.path, "-n", "1", "--interval", "0.1")[1]
    assert relax("why", folder.path, "queue")[1].startswith("queue (incarnation 1, pid 70) died: SIGKILL")
    assert (
        len(relax("events", folder.path, "--kind", "child_exited", "--actor", "queue")[1].splitlines()) == 1
    )
    assert relax("events", folder.path, "--actor", "head", "-n", "1")[0] == 0
    assert relax("dead-letters", folder.path) == (0, "no dead letters\n", "")
    for options in ([], ["--native"]):
        code, out, error = relax("stack", folder.path, "queue", *options)
        assert (code, out) == (2, "")
        assert error.startswith("error: `queue` does not run")
    assert relax("why", folder.path, "quee") == (
        2,
        "",
        f"error: `quee` is not an actor of `{folder.path}`\n\nhint: did you mean queue?\n",
    )


def test_the_version_is_shown(relax):
    assert relax("--version")[1].startswith("relax-actor, version ")


@pytest.fixture
def command(monkeypatch):
    """Let a command do something else."""

    def set_to(action) -> None:
        monkeypatch.setattr(cli.command_line.commands["stop"], "callback", lambda **_: action())

    return set_to


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


def test_ctrl_c_outside_a_run_is_130(relax, command):
    command(raising(KeyboardInterrupt()))
    assert relax("stop", "x")[0] == 130


def test_a_second_ctrl_c_while_the_interpreter_ends_does_not_change_the_exit_code():
    code = """
import os, sys
class Late:
    def __init__(self, kill, pid): self.kill, self.pid = kill, pid
    def __del__(self): self.kill(self.pid, 2)
late = Late(os.kill, os.getpid())
from relax_actor.__main__ import main
sys.argv = ["relax-actor", "status"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)

    assert done.returncode == 2


def test_an_error_of_ours_during_a_run_is_1(relax, command):
    command(raising(cli.RelaxError("it broke")))
    assert relax("stop", "x") == (1, "", "error: it broke\n")


@pytest.mark.parametrize("error", [cli.ConfigError("rollout.stop", "is odd"), DatasetError("a:1", "is odd")])
def test_a_configuration_that_is_found_wrong_late_is_2(relax, command, error):
    command(raising(error))
    assert relax("stop", "x") == (2, "", f"error: `{error.where}` is odd\n")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), "`runs/a`: no space left on device"),
        (OSError(errno.EIO, "Input/output error"), "input/output error"),
        (OSError("odd"), "odd"),
    ],
)
def test_what_the_system_refuses_is_said_without_a_traceback(relax, command, error, text):
    command(raising(error))
    assert relax("stop", "x") == (1, "", f"error: {text}\n")


def test_any_usage_error_is_2(relax, command):
    command(raising(click.ClickException("Odd.")))
    assert relax("stop", "x") == (2, "", "error: odd\n\nhint: relax-actor --help shows what there is\n")


def test_a_reader_that_goes_away_ends_the_output_quietly(tmp_path):
    folder = RunFolder.create(str(tmp_path / "run"), name="x")
    folder.log_path("trainer", 1).write_text("line\n" * 50_000)
    folder.events.touch()
    program = f"{sys.executable} -c 'from launcher.cli import main; main()'"
    command = f"{program} logs {folder.path} -n 50000 | head -n 1"

    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stdout, done.stderr) == (1, "trainer#1 │ line\n", "")


def shell(program: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program, its output buffered, with its streams led elsewhere."""
    command = f"PYTHONUNBUFFERED= {sys.executable} -c '{program}' {redirection}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_stream_that_is_closed_leads_nowhere_and_its_number_is_taken(redirection):
    program = "import os, sys; from launcher.cli import _open_missing_streams as mend; mend()"
    program += "; [os.fstat(fd) for fd in range(3)]; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"

    assert shell(program, redirection).returncode == 0


@pytest.mark.parametrize("redirection", [">/dev/full", "| true", ">&-"])
def test_output_that_cannot_be_written_does_not_change_the_exit_code(redirection):
    program = "import sys, time; from launcher import cli; time.sleep(0.1)"
    program += "; cli._exit_code = lambda _: print(1) or 7; cli.main()"

    done = shell(program, redirection)

    assert (done.returncode, done.stderr) == (7, "")


def test_a_stream_that_cannot_be_reconfigured_is_left_alone():
    cli._never_raise_on_text(object())
