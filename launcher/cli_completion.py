"""`relax-actor completion`: what a shell has to read to complete the command line."""

import sys

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    short_help="Print a script that completes this command line in a shell.",
    help="""Print a script that completes this command line in a shell.

    \b
      eval "$(relax-actor completion bash)"
      relax-actor completion zsh >> ~/.zshrc

    SHELL is bash (4.4 or newer), zsh or fish.
    """,
    epilog="Exit status: 0; 2 if SHELL is none of them.",
)
@click.argument("shell")
def completion(shell: str) -> None:
    """See the help above; a docstring would be shown instead of it."""
    from click.shell_completion import ShellComplete, get_completion_class  # noqa: PLC0415 - see `cli`

    kind = get_completion_class(shell) if shell in SHELLS else None
    if kind is None:
        raise click.BadParameter(f"`{shell}` is not one of {', '.join(SHELLS)}", param_hint="SHELL")
    root = click.get_current_context().find_root().command
    # Not the class' own `source`, which for bash runs one to ask for its version.
    sys.stdout.write(ShellComplete.source(kind(root, {}, "relax-actor", "_RELAX_ACTOR_COMPLETE")))
