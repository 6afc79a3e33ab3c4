"""Whether this machine can run the engine `sglang`: its interpreter, and GPUs for every replica."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from relax_actor.config import Config
from relax_actor.devices import AUTO, CPU, host_gpus, replica_groups
from relax_actor.errors import ConfigError

LOOK_S = 30.0
"""How long an interpreter may take to say whether it finds a package; nothing is imported."""

_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


def sglang_problems(config: Config, where: Callable[[str], str]) -> Iterator[ConfigError]:
    """Yield what is missing; nothing for another engine.

    Args:
        config: of the run.
        where: what errors call an option.
    """
    if config.rollout.engine != "sglang":
        return
    if why := _why_not(config.rollout.sglang_python or sys.executable, config.rollout.sglang_env):
        hint = "install `relax-actor[sglang]`, or name the interpreter that has it"
        yield ConfigError(where("rollout.sglang_python"), why, hint)
    if config.rollout.deterministic and config.rollout.chunk_tokens:
        fact = f"is {config.rollout.chunk_tokens}, but SGLang does not go on with a sample as it was begun"
        hint = "with rollout.deterministic, 0 has what a dead replica began sampled anew, to the same tokens"
        yield ConfigError(where("rollout.chunk_tokens"), fact, hint)
    yield from _devices(config, host_gpus(), where)


def _devices(config: Config, gpus: int, where: Callable[[str], str]) -> Iterator[ConfigError]:
    rollout = config.rollout
    groups = replica_groups(rollout.device, gpus, rollout.gpus_each)
    if groups == [(CPU,)]:
        if rollout.deterministic:
            fact = "is true, but SGLang's deterministic inference needs a GPU"
            yield ConfigError(where("rollout.deterministic"), fact)
        return
    last = max(int(device.partition(":")[2]) for device in groups[0])
    if last >= gpus:
        spread = f" over {rollout.hosts_per_replica} hosts" if rollout.hosts_per_replica > 1 else ""
        fact = f"is {rollout.tensor_parallel}{spread}, and this machine has {gpus} GPUs"
        yield ConfigError(where("rollout.tensor_parallel"), fact)
    elif (
        rollout.spares
        and rollout.device in {AUTO, "cuda"}  # else all are on one GPU, as was asked for
        and rollout.replicas + rollout.spares > len(groups)
    ):
        room = len(groups) - rollout.replicas
        fact = f"is {rollout.spares}, and there is room for {max(room, 0)} beside {rollout.replicas} replicas"
        yield ConfigError(where("rollout.spares"), fact, "each spare needs GPUs that no replica has")


def _why_not(python: str, env: dict[str, str]) -> str:
    own = dict(os.environ)
    if python != sys.executable:  # as the server's own environment
        own.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [python, "-c", _FIND], env={**own, **env}, capture_output=True, check=False, timeout=LOOK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run: {error}"
    return f"has no SGLang: {python}" if done.returncode else ""
