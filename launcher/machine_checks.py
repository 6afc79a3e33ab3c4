"""Whether this machine can serve a run now: memory, folders, and what servers need; see `checks`."""

import os
import tempfile
from pathlib import Path

from launcher.checks import Where
from launcher.estimate import Estimate
from launcher.sglang_checks import sglang_problems
from relax_actor.config import Config
from relax_actor.errors import ConfigError


def check_machine(
    config: Config, folder: Path, estimate: Estimate, where: Where = str, *, alone: bool = True
) -> list[ConfigError]:
    """Return what this machine lacks for a run.

    Args:
        config: checked by `check_config`.
        folder: the run folder, which need not exist.
        estimate: what the run needs.
        where: what errors call an option.
        alone: whether actors run here; other hosts are asked for their memory in time.
    """
    shared = _shared_memory(config, estimate, where) if alone else None
    servers = sglang_problems(config, where) if alone else []
    problems = [shared, _socket_folder(), _writable(folder, where), *servers]
    return [problem for problem in problems if problem]


def _shared_memory(config: Config, estimate: Estimate, where: Where) -> ConfigError | None:
    """Compare what samples and policy versions, which lie side by side, need with what is free there."""
    root = Path(config.queue.storage_path)
    try:
        free = _free_bytes(root)
    except OSError as error:
        return ConfigError(where("queue.storage_path"), f"cannot be used: {error.strerror}: {error.filename}")
    need = estimate.queue_bytes + estimate.policy_bytes
    if need <= free:
        return None
    fact = (
        f"has {_gib(free)} free, but the run needs {_gib(need)}: "
        f"{_gib(estimate.policy_bytes)} for policy versions, the rest for samples"
    )
    now = f"{config.queue.max_size_gb:g}"
    hint = f"lower queue.max_size_gb (now {now}), or make it larger, in docker with --shm-size"
    return ConfigError(f"{where('queue.storage_path')} = {root}", fact, hint)


def _free_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _socket_folder() -> ConfigError | None:
    """Ask for the folder that `relax_actor.supervision.host` puts control sockets under."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        return ConfigError("TMPDIR", f"cannot hold control sockets: {error.strerror}", "set TMPDIR")
    return None


def _writable(folder: Path, where: Where) -> ConfigError | None:
    parent = folder
    try:
        while not parent.exists():
            parent = parent.parent
    except OSError as error:
        return ConfigError(where("run.dir"), f"cannot be made: {error.strerror}: {parent}", "set --run-dir")
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return None
    return ConfigError(where("run.dir"), f"cannot be written: {parent}", "set --run-dir")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
