"""`relax-actor dcs`: parsing and words, as in `cli`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launcher.dcs_run import DcsRun
    from relax_actor.ids import PolicyVersion

_RUN = click.argument("run")
_LATEST = "latest"
_REFUSED = "2 RUN is no run or has ended,\nit has no such VERSION"


@click.group(
    "dcs",
    short_help="Look at a run's policy versions, or keep one.",
    help="""Look at a run's policy versions, check them, write one to disk.

    \b
      relax-actor dcs ls runs/mine

    Reads this host's shared memory and asks no actor; the run goes on. RUN is
    a run folder or, while it runs, a run id.
    """,
)
def dcs() -> None:
    """Group the commands below."""


@dcs.command(
    "ls",
    help="""List the policy versions in this host's shared memory.

    \b
      relax-actor dcs ls runs/mine

    `readers` counts processes that hold a lease. An `unfinished` version is
    being written or retired.
    """,
    epilog="Exit status: 0; 2 if RUN is no run, or has ended.",
)
@_RUN
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of versions.")
def _ls(run: str, *, as_json: bool) -> None:
    from launcher.dcs import ls  # noqa: PLC0415 - see the module `cli`

    ls(_found(run), sys.stdout, as_json=as_json)


@dcs.command(
    "verify",
    help="""Compare every bucket of policy versions with its checksum.

    \b
      relax-actor dcs verify runs/mine
      relax-actor dcs verify runs/mine 118

    VERSION is a number or `latest`. Without one, all of them.
    """,
    epilog=f"Exit status: 0 as published, 1 something is corrupt, {_REFUSED}.",
)
@_RUN
@click.argument("version", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of verdicts.")
def _verify(run: str, version: str | None, *, as_json: bool) -> int:
    from launcher.dcs import verify  # noqa: PLC0415 - see the module `cli`

    number = None if version in (None, _LATEST) else _number(version)
    return verify(_found(run), sys.stdout, number, only_newest=version == _LATEST, as_json=as_json)


@dcs.command(
    "export",
    help="""Write a policy version as a Hugging Face model folder.

    \b
      relax-actor dcs export runs/mine latest exported
      relax-actor dcs export runs/mine 118 exported --link

    VERSION is a number or `latest`. Configuration and tokenizer are those of
    the model that is trained. DIR is whole or not there. With --link nothing
    is copied: a loader that reads at once saves the disk, but the links lead
    nowhere once the version is retired.
    """,
    epilog=f"Exit status: 0, 1 VERSION is corrupt, {_REFUSED},\nor DIR is there or cannot be written.",
)
@_RUN
@click.argument("version")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--link", is_flag=True, help="Link into shared memory instead of copying.")
@click.option("--model", type=click.Path(path_type=Path), metavar="PATH", help="Model folder.  [the run's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def _export(run: str, version: str, folder: Path, *, link: bool, model: Path | None, as_json: bool) -> None:
    from launcher.dcs_export import export  # noqa: PLC0415 - see the module `cli`

    number = None if version == _LATEST else _number(version)
    export(_found(run), sys.stdout, number, folder, model=model, link=link, as_json=as_json)


def _found(run: str) -> "DcsRun":
    from launcher.dcs_run import find_run  # noqa: PLC0415 - see the module `cli`

    return find_run(run)


def _number(text: str) -> "PolicyVersion":
    from relax_actor.ids import PolicyVersion  # noqa: PLC0415 - see the module `cli`

    if not (text.isascii() and text.isdecimal()):
        raise click.BadParameter(f"`{text}` is neither a number nor `{_LATEST}`", param_hint="VERSION")
    return PolicyVersion(int(text))
