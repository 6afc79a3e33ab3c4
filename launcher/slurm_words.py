"""What Slurm's commands complain of, and what to do about it. Pure.

Slurm says everything in one or two lines of standard error and leaves with 1. Its words have been the same
for many releases; what is not known here is quoted as it is.
"""

import re
from collections.abc import Sequence

from relax_actor.errors import RelaxError

_HINTS: Sequence[tuple[str, str]] = (
    (r"invalid partition|partition name", "`sinfo -s` shows the partitions; see --partition"),
    (r"invalid account", "`sacctmgr show associations user=$USER` shows your accounts; see --account"),
    (
        r"invalid qos|violates accounting/qos|qos\w*limit",
        "`sacctmgr show qos` shows the limits; ask for fewer --nodes, less --time, or another qos",
    ),
    (r"time specification|time limit", "--time is MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
    (
        r"generic resource|gres",
        "`sinfo -o '%N %G'` shows which nodes have GPUs; see --gpus-per-node and --partition",
    ),
    (r"memory", "`sinfo -o '%N %m'` shows the nodes' memory in MB; see --sbatch-opt mem="),
    (
        r"node configuration is not available",
        "no node is so large: `sinfo -o '%N %c %m %G'` shows cores, memory and GPUs of each",
    ),
    (
        r"node count|more processors|only allocated",
        "ask for fewer --nodes; `sinfo -s` shows how many there are",
    ),
    (r"invalid node name", "`sinfo -N` shows the nodes"),
    (r"reservation", "`scontrol show reservations` shows them; see --sbatch-opt reservation="),
    (r"invalid feature", "`sinfo -o '%N %f'` shows the features; see --sbatch-opt constraint="),
    (
        r"expired or invalid job|invalid job id|already completing|job/step already|been revoked",
        "the allocation is over; `squeue --me` shows what you have, salloc gives a new one",
    ),
    (
        r"contact slurm controller|configuration source|cannot stat file",
        "Slurm does not answer on this host: `scontrol ping`; is this a login node of the cluster?",
    ),
    (r"munge|authentication|credential", "Slurm does not know this host or user: is munge running here?"),
    (
        r"execve\(\): (?P<what>\S+): no such file",
        "the interpreter is not at that path on the node: see --venv and --remote-python",
    ),
    (r"unrecognized option|invalid option|ambiguous", "`sbatch --help` shows the options of this Slurm"),
    (
        r"socket timed out|communication|connection refused|node failure|unable to contact",
        "a node or the network is in trouble: `sinfo -R` says what is known",
    ),
)

_PREFIX = re.compile(r"^\s*(sbatch|srun|scontrol|slurmstepd(-\S+)?): ((error|fatal): )?", re.MULTILINE)
_NOISE = re.compile(r"lacks support for cpu binding|^Try \"", re.IGNORECASE)


class SlurmError(RelaxError):
    """A command of Slurm did not do what was asked.

    Args:
        command: its name.
        said: what it wrote to standard error.
    """

    def __init__(self, command: str, said: str) -> None:
        self.command, self.fact = command, fact_of(said)
        self.hint = hint_of(said)
        super().__init__(f"`{command}`: {self.fact}" + (f"\n\nhint: {self.hint}" if self.hint else ""))


def fact_of(said: str) -> str:
    """Return what a command complained of in one line: its last words, which name the reason."""
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines()]
    telling = [line for line in lines if line and not _NOISE.search(line)]
    return "; ".join(dict.fromkeys(telling[-2:])) or "it said nothing"


def hint_of(said: str) -> str:
    """Return what to do about it; empty where that is not known."""
    lower = said.lower()
    return next((hint for pattern, hint in _HINTS if re.search(pattern, lower)), "")
