"""Which GPUs a host has, and who uses them: the words of nvidia-smi, which every driver brings."""

import pwd
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from relax_actor.survey.records import Gpu, GpuProcess

SMI_S = 30.0
"""How long nvidia-smi may take: without persistence mode it wakes every GPU first."""

_SMI = ("nvidia-smi", "--format=csv,noheader,nounits")
_GPUS = ("index", "uuid", "name", "memory.total", "memory.used")
_APPS = ("gpu_uuid", "pid", "used_memory", "process_name")


def gpus(run: Callable[[Sequence[str]], str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of this host; none where nvidia-smi is missing or fails.

    Args:
        run: runs a command and returns what it wrote; None: really.
    """
    run = run or _run
    try:
        listed = _table(run((*_SMI, f"--query-gpu={','.join(_GPUS)}")))
        used = _table(run((*_SMI, f"--query-compute-apps={','.join(_APPS)}")))
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(
        Gpu(
            index=index,
            uuid=uuid,
            name=name,
            total_mib=_number(total),
            used_mib=_number(in_use),
            processes=tuple(_process(row) for row in used if len(row) == len(_APPS) and row[0] == uuid),
        )
        for index, uuid, name, total, in_use in (row for row in listed if len(row) == len(_GPUS))
    )


def owner_of(pid: int) -> str:
    """Return the user of a process; empty where it cannot be seen."""
    with suppress(OSError):
        uid = Path(f"/proc/{pid}").stat().st_uid
        with suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
        return str(uid)
    return ""


def _process(row: Sequence[str]) -> GpuProcess:
    pid = _number(row[1])
    return GpuProcess(pid=pid, owner=owner_of(pid), name=Path(row[3]).name, used_mib=_number(row[2]))


def _table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_S)
    return done.stdout
