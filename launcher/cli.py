"""The command line, `relax-actor`.

Parsing and words only: each command imports its work when it is called, so that `--help` is quick.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from launcher.cli_completion import completion
from launcher.cli_dcs import dcs
from launcher.cli_launch import doctor, launch, plan
from launcher.cli_operating import ORDERS
from launcher.cli_seeing import COMMANDS
from launcher.errors import ExitCode, RefusedError, RunFolderError, report
from launcher.fields import nearest
from relax_actor.errors import ConfigError, RelaxError

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 80,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit.

    Args:
        arguments: without the program's name; those of the process if None.
    """
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        _never_raise_on_text(stream)
    exit_code = _exit_code(sys.argv[1:] if arguments is None else arguments)
    _give_up_on_unwritable(sys.stdout)
    sys.exit(exit_code)


def _open_missing_streams() -> None:
    """Let streams that the caller closed lead nowhere: else the next file would take their number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def _give_up_on_unwritable(stream: Any) -> None:
    """Drop what nobody can be told, so that the exit code stays that of the command."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _never_raise_on_text(stream: Any) -> None:
    """Let a terminal without UTF-8 show escapes instead of ending the run."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        result = command_line.main(list(arguments), prog_name="relax-actor", standalone_mode=False)
    except click.ClickException as error:
        return _complain(_usage(error), ExitCode.CONFIG)
    except click.Abort:
        return 128 + signal.SIGINT
    except RelaxError as error:
        return _complain(report(error), _refusal_code(error))
    except OSError as error:  # a disk that is full, a file system that is read-only: not our mistake
        return _complain(f"error: {_system_fact(error)}", ExitCode.RUN_FAILED)
    return int(result or 0)


def _complain(text: str, code: int) -> int:
    sys.stderr.write(text + "\n")
    return code


def _refusal_code(error: RelaxError) -> int:
    if isinstance(error, RefusedError):
        return error.exit_code
    return ExitCode.CONFIG if isinstance(error, (ConfigError, RunFolderError)) else ExitCode.RUN_FAILED


def _system_fact(error: OSError) -> str:
    fact = (error.strerror or str(error)).lower()
    return f"`{error.filename}`: {fact}" if error.filename else fact


def _usage(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    fact, _, meant = error.format_message().rstrip(".").partition(". Did you mean ")
    if isinstance(error, click.NoSuchOption):
        fact = f"`{error.option_name}` is not an option"
        close = nearest(error.option_name, error.possibilities or ())
        meant = f"{close}?" if close else ""
    hint = f"did you mean {meant}" if meant else f"{_path(context)} --help shows what there is"
    return f"error: {fact[:1].lower() + fact[1:]}\n\nhint: {hint}"


def _path(context: click.Context | None) -> str:
    return context.command_path if context else "relax-actor"


class _InOrder(click.Group):
    """Lists commands in the order in which one needs them, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names as they were added."""
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings=CONTEXT,
    help="""Train a language model with RL in supervised OS processes, without Ray.

    \b
      relax-actor launch run.toml
      relax-actor launch --model m --dataset d.jsonl train.learning_rate=2e-6
      relax-actor status runs/run-20260101-120000 --follow
      relax-actor why runs/run-20260101-120000 rollout/3
    """,
)
@click.version_option(package_name="relax-actor", prog_name="relax-actor")
def command_line() -> None:
    """See the help above; a docstring would be shown instead of it."""


command_line.add_command(launch)
command_line.add_command(plan)
command_line.add_command(doctor)


for _command in (*ORDERS, *COMMANDS, dcs, completion):
    command_line.add_command(_command)
