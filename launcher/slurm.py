"""A job for Slurm, as text: the batch script that runs a launch, and the words of that launch. Pure.

The script keeps its shell alive beside the head, since Slurm's warning before the time limit (`--signal=B:`)
reaches only that shell, which passes it on. The head keeps a checkpoint and leaves with `PREEMPTED`; then the
script puts the job back into the queue, where that was asked for, and the next attempt goes on from there.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from launcher.options import LaunchOptions

PREEMPTED = 140
"""How a head ends that was told by USR2 to make room: 128 + 12."""

NOTICE_S = 180
"""How long before the time limit the shell is told."""

_SAFE = re.compile(r"[A-Za-z0-9_./:,@%+=\[\]-]+")
_FLAGS = frozenset({"--slurm", "--requeue", "--dry-run", "--json"})
_VALUES = frozenset(
    {"--nodes", "--partition", "--account", "--time", "--sbatch-opt", "--run-dir", "--resume", "--launcher"}
)
"""Words that say how to submit, or that the job says anew."""

_ENV = frozenset({"-x", "--env"})


def sbatch(options: LaunchOptions, argv: Sequence[str], *, name: str, folder: str) -> str:
    """Return a batch script of at most 25 lines.

    Args:
        options: what the launch was told of Slurm and GPUs.
        argv: the command that the first host of the job runs; `head_argv` makes it.
        name: of the job.
        folder: absolute path of the run folder, which must exist when the job starts.
    """
    quoted = shlex.quote(folder)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {words}" for words in _directives(options, name, folder)),
        "",
        f"attempt={quoted}/attempt_${{SLURM_RESTART_COUNT:-0}}",
        'mkdir -p "$attempt"',
        "trap 'kill -USR2 $!' USR2  # the time is almost over: keep a checkpoint and leave",
        "trap 'kill -TERM $!' TERM",
        f'{shlex.join(argv)} >>"$attempt/head.log" 2>&1 &',
        "head=$!",
        "while kill -0 $head 2>/dev/null; do wait $head; done",
        "wait $head; code=$?",
        *(
            [f'[ $code -eq {PREEMPTED} ] && scontrol requeue "$SLURM_JOB_ID"']
            if options.slurm.requeue
            else ()
        ),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def head_argv(words: Sequence[str], *, folder: str) -> tuple[list[str], dict[str, str]]:
    """Return the words of the launch inside the job, and what its environment must have.

    Values of `-x NAME=VALUE` go to the environment: a batch script can be read by others.

    Args:
        words: of the command line that submits, after `launch`.
        folder: absolute path of the run folder.
    """
    kept, env = list[str](), dict[str, str]()
    for option, value in _options(words):
        if option in _FLAGS or option in _VALUES:
            continue
        variable, equals, text = (value or "").partition("=")
        if option in _ENV and equals:
            env[variable] = text
            kept += [option, variable]
        else:
            kept += [option] if value is None else [option, value]
    return [*kept, "--launcher", "slurm", "--run-dir", folder, "--resume", "auto"], env


def _directives(options: LaunchOptions, name: str, folder: str) -> Iterator[str]:
    """Yield what follows `#SBATCH`, line by line."""
    slurm = options.slurm
    yield f"--job-name={_quoted(name)}"
    if slurm.nodes:
        yield f"--nodes={slurm.nodes}"
    yield "--ntasks-per-node=1"
    if options.selection.gpus_per_node:
        yield f"--gpus-per-node={options.selection.gpus_per_node}"
    for word, value in (("partition", slurm.partition), ("account", slurm.account), ("time", slurm.time)):
        if value:
            yield f"--{word}={_quoted(value)}"
    yield f"--output={_quoted(folder.replace('%', '%%') + '/slurm-%j.out')} --open-mode=append"
    yield f"--signal=B:USR2@{NOTICE_S}"
    yield "--no-kill"  # a run goes on without a host that is lost
    yield "--requeue" if slurm.requeue else "--no-requeue"
    if slurm.options:
        yield " ".join(_extra(option) for option in slurm.options)


def _extra(option: str) -> str:
    key, equals, value = option.lstrip("-").partition("=")
    return f"--{key}={_quoted(value)}" if equals else f"--{key}"


def _quoted(text: str) -> str:
    """Quote as sbatch reads it, which knows double quotes and backslashes."""
    if _SAFE.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each word, an option that takes a value of interest together with it."""
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        name = option.replace("_", "-") if option.startswith("--") else option
        if name in _VALUES | _ENV or name in _FLAGS:
            if equals:
                yield name, value
            else:
                yield name, None if name in _FLAGS else next(rest, None)
        elif word.startswith("-x") and not word.startswith("--"):
            yield "-x", word[2:]
        else:
            yield word, None
