"""Everything that is asked of a host, answered by the host."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from relax_actor.devices import host_gpus
from relax_actor.limits import raise_open_files
from relax_actor.node.strays import VARIABLE
from relax_actor.survey import files, gpus, software, wires
from relax_actor.survey.records import Facts, Gpu, Question
from relax_actor.visible import LISTS, oddity, scheduled_gpus


def facts_of(question: Question, *, port: int = 0) -> Facts:
    """Answer a question.

    Args:
        question: what is wanted.
        port: where this process listens for other hosts; 0: nowhere.
    """
    node = os.uname().nodename
    names, spared = wires.proxies()
    facts = Facts(
        node=node,
        python=software.python(),
        versions=software.versions(),
        code=software.code_digest(),
        driver=software.driver(),
        gpus=_gpus() if question.needs_gpus else (),
        visible=scheduled_gpus(os.environ),
        oddity=next((oddity(os.environ[name]) for name in LISTS if name in os.environ), ""),
        memory_bytes=_available_bytes(),
        open_files=raise_open_files(),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        is_shared=files.sees(question.shared_file, question.shared_text),
        loopback_line=wires.loopback_line(node),
        interfaces=wires.interfaces(),
        proxies=names,
        no_proxy=spared,
        paths={name: files.fact_of(path, is_full=question.is_full) for name, path in question.paths.items()},
        leftovers=tuple(_leftovers(question.run_ids)),
        time_s=time.time(),
        port=port,
    )
    return _with_disk(_with_shared_memory(facts, question), question)


def _with_shared_memory(facts: Facts, question: Question) -> Facts:
    try:
        free = files.free_bytes(question.shm_root)
        writable = os.access(question.shm_root, os.W_OK | os.X_OK)
    except OSError as error:
        return msgspec.structs.replace(facts, shm_error=f"{error.strerror}: {question.shm_root}")
    why = "" if writable else f"cannot be written: {question.shm_root}"
    return msgspec.structs.replace(facts, shm_bytes=free, shm_error=why)


def _with_disk(facts: Facts, question: Question) -> Facts:
    folder = files.nearest(question.run_dir)
    sync_s, error = files.canary(folder)
    free = 0
    with suppress(OSError):
        free = files.free_bytes(folder)
    return msgspec.structs.replace(facts, disk_bytes=free, disk_error=error, sync_s=sync_s)


def _gpus() -> tuple[Gpu, ...]:
    """Return the GPUs; without nvidia-smi no more of them than their numbers."""
    return gpus.gpus() or tuple(Gpu(index=str(index)) for index in range(host_gpus({})))


def _available_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _leftovers(run_ids: tuple[str, ...]) -> Iterator[str]:
    """Yield the processes that runs still have here, by their mark; files are cleared by the next start."""
    for run_id in run_ids:
        mark = f"{VARIABLE}={run_id}/".encode()
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and (actor := _actor_of(process, mark)):
                yield f"pid {process.name} ({actor} of run {run_id})"


def _actor_of(process: Path, mark: bytes) -> str:
    with suppress(OSError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            if variable.startswith(mark):
                return variable[len(mark) :].decode(errors="replace")
    return ""
