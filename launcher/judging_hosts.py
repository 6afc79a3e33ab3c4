"""What is wrong with each host by itself: its software, its GPUs, its memory and its disk. Pure.

Each check yields what it finds; its companion with `_of` says what there is where nothing is wrong.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from launcher.columns import size
from launcher.hostlist import fold
from launcher.verdicts import Case, Verdict, Wanted, fail, least, listed, warn
from relax_actor.survey.records import Facts, Gpu

FEW_OPEN_FILES = 4096
SLOW_SYNC_S = 1.0
LEAST_DISK_BYTES = 1 << 30
_SAME = ("torch", "cuda", "nccl", "sglang", "megatron-core", "transformers")
_INSTALL = "install the same in that environment there, or give another one: --venv DIR"


def software(case: Case) -> Iterator[Verdict]:
    """Have every host run what the first one runs, and relax-actor as it is here."""
    name, first = next(iter(case.facts.items()))
    code = case.here.code if case.here is not None else first.code
    for host, facts in case.facts.items():
        if facts.code != code:
            fact = f"relax-actor's files are others (digest {facts.code}, here {code})"
            yield fail(host, fact, "install the same version everywhere; an editable one has to be copied")
        if _minor(facts.python) != _minor(first.python):
            yield fail(host, f"has Python {facts.python}, {name} has {first.python}", _INSTALL)
        for package in _SAME:
            own, theirs = facts.versions.get(package, ""), first.versions.get(package, "")
            if own != theirs:
                fact = f"has {_version(package, own)}, {name} has {_version(package, theirs)}"
                yield fail(host, fact, _INSTALL)


def software_of(case: Case) -> str:
    """Say what all hosts run."""
    first = next(iter(case.facts.values()))
    versions = [f"{name} {first.versions[name]}" for name in _SAME if name in first.versions]
    return ", ".join([f"python {first.python}", f"code {first.code}", *versions])


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(package: str, version: str) -> str:
    return f"{package} {version}" if version else f"no {package}"


def driver(case: Case) -> Iterator[Verdict]:
    """Find hosts whose NVIDIA driver is missing or another one."""
    drivers = Counter(facts.driver for facts in case.facts.values() if facts.driver)
    usual = drivers.most_common(1)[0][0] if drivers else ""
    for host, facts in case.facts.items():
        if facts.driver and facts.driver != usual:
            hint = "NCCL works across drivers, but their CUDA versions have to fit torch: nvidia-smi"
            yield warn(host, f"has NVIDIA driver {facts.driver}, most have {usual}", hint)
        if case.want(host).gpus and not facts.driver and not facts.gpus:
            yield fail(host, "has no NVIDIA driver", "install one, or leave the host out: --exclude")


def driver_of(case: Case) -> str:
    """Name the driver."""
    return fold(dict.fromkeys(facts.driver for facts in case.facts.values() if facts.driver)) or "none"


def gpus(case: Case) -> Iterator[Verdict]:
    """Find GPUs that are not there, or that somebody uses."""
    for host, facts in case.facts.items():
        if facts.oddity:
            yield warn(host, f"CUDA_VISIBLE_DEVICES is odd: {facts.oddity}", "set it right, or unset it")
        yield from _as_its_line_says(host, facts, case.want(host))
        for wanted in case.want(host).gpus:
            yield from _gpu(host, facts, wanted)


def _as_its_line_says(host: str, facts: Facts, want: Wanted) -> Iterator[Verdict]:
    there = len(usable_gpus(facts))
    if want.named_gpus and not there:
        yield fail(host, "has no GPU, but its line names some", "is its driver loaded? nvidia-smi")
    elif 0 < there < want.slots:
        yield warn(host, f"has {there} GPUs for us, its line says {want.slots} slots", "correct slots=")


def _gpu(host: str, facts: Facts, wanted: str) -> Iterator[Verdict]:
    gpu = find_gpu(facts.gpus, wanted)
    if gpu is None:
        if not wanted.startswith("MIG-") and facts.gpus:
            there = listed(each.index for each in facts.gpus)
            yield fail(host, f"has no GPU {wanted}; there are {there}", "correct slots= or gpus= of its line")
        return
    for process in gpu.processes:
        owner = process.owner or "another container, or user"
        who = f"pid {process.pid} ({owner}, {process.name or '?'})"
        fact = f"GPU {wanted} is in use: {size(process.used_mib * 2.0**20)} by {who}"
        yield fail(host, fact, f"wait, end it, or leave the GPU out: --exclude {host}:{wanted}")


def find_gpu(gpus: Sequence[Gpu], wanted: str) -> Gpu | None:
    """Return the GPU that a number, or a UUID or its beginning, means."""
    return next(
        (gpu for gpu in gpus if gpu.index == wanted or (len(wanted) > 6 and gpu.uuid.startswith(wanted))),
        None,
    )


def usable_gpus(facts: Facts) -> tuple[str, ...]:
    """Return the GPUs that a host has for us, as its CUDA_VISIBLE_DEVICES has to name them."""
    if facts.visible is None:
        return tuple(gpu.index for gpu in facts.gpus)
    return facts.visible if facts.gpus else ()


def gpus_of(case: Case) -> str:
    """Say how many GPUs may be used."""
    counts = Counter(len(usable_gpus(facts)) for facts in case.facts.values())
    return ", ".join(
        f"{count} on {hosts} hosts" if len(counts) > 1 else f"{count} each" for count, hosts in counts.items()
    )


def memory(case: Case) -> Iterator[Verdict]:
    """Find hosts with too little memory for their actors."""
    for host, facts in case.facts.items():
        need, free = case.want(host).memory_bytes, facts.memory_bytes
        if free and need > free:
            fact = f"has {size(free)} of memory available, the actors need {size(need)}"
            yield warn(host, fact, "fewer rollouts there: slots=, or end what else runs there")


def memory_of(case: Case) -> str:
    """Say how much memory all have."""
    return least(facts.memory_bytes for facts in case.facts.values())


def shared_memory(case: Case) -> Iterator[Verdict]:
    """Find hosts with too little shared memory for samples and policy versions."""
    for host, facts in case.facts.items():
        need = case.want(host).shm_bytes
        if facts.shm_error:
            yield fail(host, f"{case.shm_option}: {facts.shm_error}", f"give another: {case.shm_option}=PATH")
        elif need > facts.shm_bytes:
            fact = f"has {size(facts.shm_bytes)} free, the run needs {size(need)}"
            yield fail(host, fact, "lower queue.max_size_gb, or make it larger, in docker with --shm-size")


def shared_memory_of(case: Case) -> str:
    """Say how much shared memory all have."""
    return least(facts.shm_bytes for facts in case.facts.values())


def limits(case: Case) -> Iterator[Verdict]:
    """Find limits that a large run meets."""
    for host, facts in case.facts.items():
        limit, most = facts.open_files
        if 0 <= limit < FEW_OPEN_FILES:
            fact = f"allows {limit} open files, at most {most}"
            yield warn(host, fact, "raise it: `* hard nofile 1048576` in /etc/security/limits.conf there")
        if facts.gpus and 0 <= facts.locked_bytes < 1 << 30:
            fact = f"allows {size(facts.locked_bytes)} of locked memory"
            yield warn(host, fact, "InfiniBand needs more: `* - memlock unlimited` in limits.conf there")


def limits_of(case: Case) -> str:
    """Say how many files may be open."""
    limits = [facts.open_files[0] for facts in case.facts.values() if facts.open_files[0] >= 0]
    return f"{min(limits)} open files or more" if limits else "any number of open files"


def disk(case: Case) -> Iterator[Verdict]:
    """Find disks that are full, slow, or cannot be written."""
    for host, facts in case.facts.items():
        need = max(case.want(host).disk_bytes, LEAST_DISK_BYTES)
        if facts.disk_error:
            yield fail(host, f"cannot write: {facts.disk_error}", "give another folder: --run-dir DIR")
            continue
        if facts.disk_bytes < need:
            fact = f"has {size(facts.disk_bytes)} of disk free, and should have {size(need)}"
            yield fail(host, fact, "make room, or give another folder: --run-dir DIR")
        if facts.sync_s > SLOW_SYNC_S:
            fact = f"took {facts.sync_s:.1f} s to have 4 KiB on disk"
            yield warn(host, fact, "the queue writes a journal there: give a faster disk, --run-dir DIR")


def disk_of(case: Case) -> str:
    """Say how much room all have, and how quick the slowest is."""
    slowest_ms = max(facts.sync_s for facts in case.facts.values()) * 1e3
    return f"{least(facts.disk_bytes for facts in case.facts.values())}, on disk within {slowest_ms:.1f} ms"


def run_folder_of(case: Case) -> str:
    """Say who sees the head's run folder."""
    seeing = [host for host, facts in case.facts.items() if facts.is_shared]
    if len(seeing) == len(case.facts):
        return "the same for all"
    return f"shared by {fold(seeing)}" if seeing else "of each host's own; logs and events are handed over"
