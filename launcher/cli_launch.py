"""`relax-actor launch` and `plan`: parsing and words, as in `cli`."""

import sys
from pathlib import Path
from typing import Any

import click

from launcher.cli_options import WORDS, Sectioned, choices, divided, dry_run, with_options

COLORS = ("auto", "always", "never")
"""`auto` is by terminal, and by the environment's NO_COLOR and FORCE_COLOR."""


@click.command(
    "launch",
    cls=Sectioned,
    short_help="Run a training job until it is done.",
    help="""Run a training job until it is done, here or over several hosts.

    \b
      relax-actor launch run.toml rollout.replicas=4 --steps 50
      relax-actor launch run.toml --run-dir runs/mine --resume auto
      relax-actor launch run.toml -H hostfile -x WANDB_API_KEY --dry-run

    Settings come from CONFIG.toml, then SECTION.KEY=VALUE, then options; what
    comes later wins. Paths in the file are relative to the file. Ctrl-C stops
    all actors in order; a second one kills them.
    """,
    epilog="""\b
    Exit status: 0 done, 1 the run failed, 2 the configuration is wrong,
    3 the hosts cannot run it, 4 a host was lost, 130 after Ctrl-C,
    140 preempted by SIGUSR2, 143 after SIGTERM.
    """,
)
@with_options
@click.option(
    "--preflight",
    metavar="HOW",
    shell_complete=choices("full", "quick", "off"),
    help="What is asked of hosts first: full, quick or off.  [quick]",
)
@dry_run
@click.option("--json", "as_json", is_flag=True, help="Print the plan of a dry run as JSON.")
@click.option("--log-dir", metavar="PATH", help="Where actors' logs go.  [logs in the run folder]")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard files.")
@click.option("--tag-output/--no-tag-output", help="Also print what actors write, as `logs -f`.  [no]")
@click.option("--live/--plain", default=None, help="Redraw in place, or a line an event.  [by terminal]")
@click.option("--color", type=click.Choice(COLORS), default="auto", help="Of what is redrawn.  [auto]")
def launch(
    arguments: tuple[str, ...],
    *,
    as_json: bool,
    tensorboard: bool,
    tag_output: bool,
    live: bool | None,
    color: str,
    **values: Any,
) -> int:
    """See the help above; a docstring would be shown instead of it."""
    far, near = values.pop("dry_run_on_hosts"), values.pop("dry_run")
    if as_json and not (near or far):
        raise click.UsageError("`--json` prints the plan of a dry run: give --dry-run, too")
    values["dry_run"] = "remote" if far else "local" if near else None
    return _carry_out(
        arguments,
        values,
        dry_run=near or far,
        as_json=as_json,
        tensorboard=tensorboard,
        tag_output=tag_output,
        color=color,
        live=False if tag_output else live,  # lines and a picture that is redrawn do not go together
    )


@click.command(
    "plan",
    cls=Sectioned,
    short_help="Check a job and print what a launch would start and need.",
    help="""Check a job and print what a launch would start and need.

    \b
      relax-actor plan run.toml train.global_batch_size=64
      relax-actor plan run.toml -H hostfile --rollout-gpus 31

    Starts nothing, asks no host and imports no torch. With --run-dir,
    plan.json and resolved.toml are written there.
    """,
    epilog="Exit status: 0 it can be launched, 2 the configuration is wrong.",
)
@with_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(arguments: tuple[str, ...], *, as_json: bool, **values: Any) -> int:
    """See the help above; a docstring would be shown instead of it."""
    return _carry_out(arguments, values, dry_run=True, as_json=as_json)


def _carry_out(arguments: tuple[str, ...], values: dict[str, Any], **how: Any) -> int:
    """Launch, or what a launch does without starting anything; `how` are fields of the request."""
    from launcher.launch import Request, launch  # noqa: PLC0415 - see the module `cli`

    config_path, overrides = _split(arguments)
    flags, words = divided(values)
    argv = click.get_current_context().meta[WORDS]
    request = Request(
        config_path=config_path, overrides=overrides, flags=flags, words=words, argv=argv, **how
    )
    return launch(request, sys.stdout)


@click.command(
    "doctor",
    cls=Sectioned,
    short_help="Ask hosts whether a job could run there, and say why not.",
    help="""Ask hosts whether a job could run there, and say why not.

    \b
      relax-actor doctor run.toml -H hostfile
      relax-actor doctor --hosts node1:8,node2:8 --quick

    All hosts are asked at once, through the sessions that a launch would use;
    without any, this one is. One table says what is wrong, each with a hint.
    Starts nothing and leaves nothing. Without a configuration nothing is said
    of models and memory that a run would need.
    """,
    epilog="Exit status: 0 it can run there, 2 the configuration is wrong, 3 it cannot.",
)
@with_options
@click.option("--quick", is_flag=True, help="Fewer ways between hosts, and no digests of whole files.")
@click.option("--json", "as_json", is_flag=True, help="Print the table and all facts as one JSON object.")
def doctor(arguments: tuple[str, ...], *, quick: bool, as_json: bool, **values: Any) -> None:
    """See the help above; a docstring would be shown instead of it."""
    from launcher.preflight_run import doctor as examine  # noqa: PLC0415 - see the module `cli`

    config_path, overrides = _split(arguments)
    flags, words = divided(values)
    examine(config_path, overrides, flags, words, sys.stdout, is_full=not quick, as_json=as_json)


def _split(arguments: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Tell the configuration file, which comes first, from the overrides."""
    if arguments and ("=" not in arguments[0] or arguments[0].endswith(".toml")):
        return Path(arguments[0]), arguments[1:]
    return None, arguments
