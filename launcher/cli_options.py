"""The options of `launch` and `plan`, in sections, and the command that shows them so."""

from collections.abc import Callable, Sequence
from typing import Any

import click

WORDS = "launcher.words"
"""Key of a click context's `meta`: the words of the command line behind the command's name."""

_REHEARSE_AFAR = "--dry-run-on-hosts"


def choices(*words: str) -> Callable[..., list[str]]:
    """Let a shell complete one of a few words; what is typed is checked elsewhere."""
    return lambda _context, _parameter, typed: [word for word in words if word.startswith(typed)]


OPTIONS: dict[str, tuple[tuple[tuple[str, ...], dict[str, Any]], ...]] = {
    "Options": (
        (
            ("--mode",),
            {
                "shell_complete": choices("async_on_policy", "async_off_policy", "colocate"),
                "metavar": "MODE",
                "help": "async_on_policy, async_off_policy or colocate  [async_off_policy]",
            },
        ),
        (
            ("--model",),
            {"type": click.Path(), "metavar": "PATH", "help": "Hugging Face model folder to train."},
        ),
        (("--dataset",), {"type": click.Path(), "metavar": "PATH", "help": "Prompts, JSONL."}),
        (("--steps",), {"metavar": "N", "help": "Optimizer steps.  [100]"}),
        (("--global-batch-size",), {"metavar": "N", "help": "Samples a step.  [128]"}),
        (("--micro-batch-size",), {"metavar": "N", "help": "Samples forward and backward at once.  [32]"}),
        (("--partial-rollout",), {"is_flag": True, "help": "Put unfinished samples, every 256 tokens."}),
        (
            ("--run-dir",),
            {"type": click.Path(), "metavar": "PATH", "help": "Run folder.  [runs/{name}-{time}]"},
        ),
        (
            ("--resume",),
            {
                "shell_complete": choices("auto", "none"),
                "metavar": "WHAT",
                "help": "none, auto (newest checkpoint), a step or a path.  [none]",
            },
        ),
        (("--grace",), {"metavar": "S", "help": "Seconds a stop may take.  [60]"}),
    ),
    "Hosts": (
        (
            ("-H", "--hostfile"),
            {
                "type": click.Path(),
                "metavar": "FILE",
                "help": "Hosts, one a line; see docs/guides/clusters.md.",
            },
        ),
        (("--hosts",), {"metavar": "LIST", "help": "Hosts without a file: a:8,b:8."}),
        (("-i", "--include"), {"metavar": "SPEC", "help": "Only these: a@b:0,2."}),
        (("-e", "--exclude"), {"metavar": "SPEC", "help": "All but these."}),
        (("--num-nodes",), {"metavar": "N", "help": "The first N hosts.  [all]"}),
        (("--gpus-per-node",), {"metavar": "N", "help": "The first N GPUs of each host, or auto.  [auto]"}),
        (
            ("--launcher",),
            {
                "shell_complete": choices("auto", "local", "ssh", "slurm"),
                "metavar": "WHAT",
                "help": "auto, local, ssh or slurm.  [auto]",
            },
        ),
    ),
    "GPUs": (
        (("--gpus",), {"metavar": "N", "help": "GPUs of the whole run."}),
        (("--train-gpus",), {"metavar": "N", "help": "GPUs of the trainer.  [1, or 0 on a CPU]"}),
        (("--rollout-gpus",), {"metavar": "N", "help": "GPUs of all rollouts; sets rollout.replicas."}),
        (
            ("--placement",),
            {
                "shell_complete": choices("spread", "pack"),
                "metavar": "HOW",
                "help": "spread over hosts, or pack one after another.  [spread]",
            },
        ),
    ),
    "Ssh": (
        (("--ssh-port",), {"metavar": "P", "help": "Port of sshd.  [as ssh is configured]"}),
        (("--user",), {"metavar": "U", "help": "User on the hosts.  [as ssh is configured]"}),
        (
            ("--identity",),
            {"type": click.Path(), "metavar": "FILE", "help": "Private key.  [as ssh is configured]"},
        ),
        (
            ("--ssh-opt",),
            {"metavar": "KEY=VALUE", "multiple": True, "help": "Given to ssh as -o; may be repeated."},
        ),
        (("--fanout",), {"metavar": "N", "help": "Sessions being opened at once.  [32]"}),
        (("--connect-timeout",), {"metavar": "S", "help": "Seconds for one connection.  [10]"}),
    ),
    "Environment of actors": (
        (
            ("-x", "--env"),
            {
                "metavar": "NAME[=VALUE]",
                "multiple": True,
                "help": "A variable, from here or as given; may be repeated.",
            },
        ),
        (
            ("--env-file",),
            {
                "type": click.Path(),
                "metavar": "FILE",
                "help": "Variables, NAME=VALUE a line, taken as they are.",
            },
        ),
        (("--workdir",), {"metavar": "DIR", "help": "Folder on the hosts.  [as here]"}),
        (("--venv",), {"metavar": "DIR", "help": "Environment on the hosts: DIR/bin/python."}),
        (
            ("--remote-python",),
            {"type": click.Path(), "metavar": "PATH", "help": "Interpreter on the hosts.  [as here]"},
        ),
        (
            ("--setup",),
            {
                "type": click.Path(),
                "metavar": "FILE",
                "help": "Shell script of this host, sourced on each first.",
            },
        ),
    ),
    "Network": (
        (("--master-addr",), {"metavar": "ADDR", "help": "Where hosts reach this one.  [by the route]"}),
        (("--ifname",), {"metavar": "NAME", "help": "Network interface on all hosts.  [by the route]"}),
        (("--port-range",), {"metavar": "A-B", "help": "Ports that may be bound.  [the kernel's choice]"}),
    ),
    "Slurm": (
        (("--slurm",), {"is_flag": True, "help": "Submit a job instead of running here."}),
        (("--nodes",), {"metavar": "N", "help": "Nodes of the job."}),
        (("--partition",), {"metavar": "NAME", "help": "Partition of the job."}),
        (("--account",), {"metavar": "NAME", "help": "Account of the job."}),
        (("--time",), {"metavar": "T", "help": "Time limit of the job, as for sbatch."}),
        (
            ("--sbatch-opt",),
            {
                "metavar": "KEY[=VALUE]",
                "multiple": True,
                "help": "Another option of sbatch; may be repeated.",
            },
        ),
        (("--requeue",), {"is_flag": True, "help": "Go back into the queue when preempted."}),
    ),
}
"""Section -> its options, as names and what click is told."""

CONFIGURING = frozenset(
    {
        "--mode",
        "--model",
        "--dataset",
        "--steps",
        "--global-batch-size",
        "--micro-batch-size",
        "--partial-rollout",
        "--run-dir",
        "--resume",
        "--grace",
    }
)
"""Options that are short ways to say settings; all others are about hosts."""


class Sectioned(click.Command):
    """Shows its options in sections, and takes `--dry-run=remote` beside `--dry-run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Turn the one option whose value is optional into two that click can tell apart; keep the words."""
        ctx.meta[WORDS] = tuple(args)
        return super().parse_args(ctx, [_plain(arg, ctx) for arg in args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section."""
        by_section: dict[str, list[tuple[str, str]]] = {name: [] for name in OPTIONS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                by_section[_SECTION_OF.get(parameter.name or "", "Options")].append(record)
        for name, records in by_section.items():  # each has some: both commands have all of them
            with formatter.section(name):
                formatter.write_dl(records, col_max=26)


def with_options(command: Callable[..., Any]) -> Any:
    """Give a command the arguments and options of `OPTIONS`."""
    for names, settings in reversed([option for section in OPTIONS.values() for option in section]):
        command = click.option(*names, **settings)(command)
    return click.argument("arguments", nargs=-1, metavar="[CONFIG.toml] [SECTION.KEY=VALUE]...")(command)


def dry_run(command: Callable[..., Any]) -> Any:
    """Give a command `--dry-run` and `--dry-run=remote`."""
    command = click.option(_REHEARSE_AFAR, is_flag=True, hidden=True)(command)
    help_ = "Check everything, print the plan, start nothing."
    return click.option("--dry-run", is_flag=True, help=help_)(command)


def divided(values: dict[str, Any]) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Tell what is said of settings from what is said of hosts.

    Args:
        values: parameters as click names them.

    Returns:
        Flags for `settings.read`, and words for `asking.ask`.
    """
    named = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    if takes_turns := named["--mode"] == "colocate":  # on the same GPUs: nothing is sampled while training
        named |= {"--mode": "async_on_policy", "--colocate": True}
    named["--partial-rollout"] = "256" if named["--partial-rollout"] else None
    flags = {name: value for name, value in named.items() if name in CONFIGURING}
    flags |= {"--mode colocate": "true"} if takes_turns else {}
    return flags, {name: value for name, value in named.items() if name not in CONFIGURING}


def _plain(argument: str, ctx: click.Context) -> str:
    name, equals, value = argument.partition("=")
    if not equals or name.replace("_", "-") != "--dry-run":
        return argument
    if value not in {"local", "remote"}:
        raise click.UsageError(f"`--dry-run` is local or remote, got `{value}`", ctx)
    return "--dry-run" if value == "local" else _REHEARSE_AFAR


def _names_of(options: Sequence[str]) -> str:
    return options[-1].lstrip("-").replace("-", "_")


_SECTION_OF = {_names_of(names): section for section, options in OPTIONS.items() for names, _ in options}
