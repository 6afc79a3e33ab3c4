"""`launch --slurm`: write the batch script of a run into its folder, and submit it."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from launcher.options import LaunchOptions
from launcher.runfolder import RunFolder
from launcher.slurm import head_argv, sbatch
from launcher.slurm_words import SlurmError

SCRIPT = "job.sbatch"
"""The batch script, in the run folder."""

SUBMIT_S = 120.0

_WORD = re.compile(r" --([a-z-]+)")
_VARIABLES = {"TIME": "TIMELIMIT"}


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job before it is submitted."""

    script: str
    env: dict[str, str]  # what its environment has beyond this process' own; never printed


def prepare_job(options: LaunchOptions, words: Sequence[str], *, name: str, folder: Path) -> SlurmJob:
    """Work out the job of a launch; writes nothing.

    Args:
        options: what the launch was told of Slurm and GPUs.
        words: of the command line, after `launch`.
        name: of the run.
        folder: of the run.
    """
    argv, env = head_argv(words, folder=str(folder))
    head = [options.remote.python or sys.executable, "-P", "-m", "relax_actor", "launch", *argv]
    return SlurmJob(script=sbatch(options, head, name=name, folder=str(folder)), env=env)


def submit(job: SlurmJob, folder: RunFolder, out: TextIO) -> str:
    """Write the script into the run folder, submit it, say how to follow it, and return the job's number.

    Raises:
        SlurmError: sbatch refuses it, is not there, or took too long.
    """
    script = folder.path / SCRIPT
    script.write_text(job.script, encoding="utf-8")
    number = _sbatch(script, outside(os.environ, job.script) | job.env)
    out.write(
        f"submitted job {number}: {script}\n"
        f"  squeue --job {number}                 where it is in the queue\n"
        f"  relax-actor status {folder.path}      once it runs\n"
        f"  scancel {number}                      ends it\n"
    )
    return number


def _sbatch(script: Path, env: dict[str, str]) -> str:
    argv = ["sbatch", "--parsable", "--export=ALL", str(script)]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=SUBMIT_S,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    except FileNotFoundError:
        raise SlurmError("sbatch", "is not on the PATH of this host") from None
    except subprocess.TimeoutExpired:
        raise SlurmError("sbatch", f"had not ended after {SUBMIT_S:g} s") from None
    if done.returncode:
        raise SlurmError("sbatch", done.stderr)
    return done.stdout.strip().partition(";")[0]  # NUMBER or NUMBER;CLUSTER


def outside(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """Return an environment without what would overrule the words of a script.

    Args:
        environ: of this process, which may be in an allocation, and may have SBATCH_ACCOUNT and the like.
        script: what it says itself is not taken from there.
    """
    directives = "".join(line for line in script.splitlines() if line.startswith("#SBATCH"))
    said = {word.replace("-", "_").upper() for word in _WORD.findall(directives)}
    unwanted = {f"SBATCH_{_VARIABLES.get(word, word)}" for word in said} | {"SBATCH_NO_REQUEUE"}
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or (name not in unwanted and not name.startswith(("SLURM_", "SLURMD_")))
    }
