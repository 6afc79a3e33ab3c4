"""Deaths on GPUs: how soon they are told, how soon the card is free, how soon an NCCL gang is whole again.

    NCCL_NVLS_ENABLE=0 python benchmarks/gpu/deaths.py OUT.json

The yardsticks are in the same run: the pidfd, which is what waiting for the process itself would tell, and
NVML, which is when the card is free.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

import pynvml  # noqa: E402
from common import circumstances  # noqa: E402
from gpu_actors import Hog, NcclRank  # noqa: E402

from relax_actor import Backoff, ChildSpec, Supervisor, SupervisorSpec  # noqa: E402
from relax_actor.errors import GangAborted  # noqa: E402
from relax_actor.telemetry import read_events  # noqa: E402

SIZES = ((2, 0), (60, 0), (2, 16), (60, 32))  # GiB on the card, GiB pinned
ROUNDS = 2
SLACK = 512 * 2**20
"""What another process may hold of the card meanwhile, in bytes."""
TORCH = {"default": ("torch",)}
QUICK = Backoff(base_s=0.001, cap_s=0.01)


def main() -> None:
    pynvml.nvmlInit()
    gpus = pynvml.nvmlDeviceGetCount()
    command = "NCCL_NVLS_ENABLE=0 python benchmarks/gpu/deaths.py OUT.json"
    result = circumstances("gpu-deaths", command=command) | {
        "gpus": [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(gpus)],
        "gang": [gang() for _ in range(ROUNDS)] if gpus > 1 else "not run: one GPU",
        "death": [],
    }
    for size in SIZES * ROUNDS:  # in turn: a cut-off run has some of each
        result["death"].append(death(*size))
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")  # and keeps its rows
    print(json.dumps(result))


def death(gpu_gib: int, pinned_gib: int) -> dict[str, object]:
    """Kill an actor with kernels running; times are milliseconds after the kill."""
    hog = ChildSpec(
        id="hog",
        actor=Hog,
        args={"gpu_gib": gpu_gib, "pinned_gib": pinned_gib},
        devices=("cuda:0",),
        start_timeout_s=300.0,
    )
    spec = SupervisorSpec(id="bench", backoff=QUICK, children=(hog,))
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    idle = pynvml.nvmlDeviceGetMemoryInfo(card).used
    with Supervisor(spec, zygotes=TORCH) as tree:
        ref = tree.ref("hog", Hog).within(300)
        burning = ref.ask(Hog.burn, 300.0)
        time.sleep(1.5)
        pid = tree.pid("hog") or 0
        watch = Watch(pid, card, idle + SLACK)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        error = burning.exception()
        told = time.monotonic()
        again = ref.ask(Hog.where).result()
        answered = time.monotonic()
        watch.join()
        events, _ = read_events(tree.run_dir / "events.jsonl")
    second = [event for event in events if event["kind"] == "child_spawned" and event["incarnation"] == 2]
    exited = [event for event in events if event["kind"] == "child_exited" and event["incarnation"] == 1]
    return {
        "gpu_gib": gpu_gib,
        "pinned_gib": pinned_gib,
        "pending_call_failed_ms": ms(told - killed),
        "error": str(error),
        "pidfd_readable_ms": ms(watch.process_gone - killed),
        "card_free_ms": ms(watch.card_free - killed),
        "gone_told_ms": ms(exited[0]["m"] - killed),
        "next_process_ms": ms(second[0]["m"] - killed),
        "next_process_after_card_free": second[0]["m"] >= watch.card_free - 0.005,
        "answered_again_ms": ms(answered - killed),
        "incarnation": again[1],
    }


class Watch(threading.Thread):
    """Sees when the kernel and the driver have let go of a process."""

    def __init__(self, pid: int, card: object, free_at: int) -> None:
        super().__init__(daemon=True)
        self._pidfd, self._card, self._free_at = os.pidfd_open(pid), card, free_at
        self.process_gone = self.card_free = 0.0
        self.start()

    def run(self) -> None:
        while not (self.process_gone and self.card_free):
            if not self.card_free and pynvml.nvmlDeviceGetMemoryInfo(self._card).used <= self._free_at:
                self.card_free = time.monotonic()
            if not self.process_gone and select.select([self._pidfd], [], [], 0.001)[0]:
                self.process_gone = time.monotonic()


def gang() -> dict[str, object]:
    """Kill one of two NCCL ranks inside a collective."""
    ranks = ChildSpec(id="rank", actor=NcclRank, replicas=2, gang=True, start_timeout_s=300.0)
    spec = SupervisorSpec(id="bench", backoff=QUICK, children=(ranks,))
    with Supervisor(spec, zygotes=TORCH) as tree:
        refs = [tree.ref(f"rank/{rank}", NcclRank).within(300) for rank in range(2)]
        first = [reply.result() for reply in [ref.ask(NcclRank.sum_of_ranks) for ref in refs]]
        before = refs[0].ask(NcclRank.where).result()
        replies = [ref.ask(NcclRank.sum_until_aborted) for ref in refs]
        time.sleep(2.0)
        killed = time.monotonic()
        os.kill(tree.pid("rank/1") or 0, signal.SIGKILL)
        error = replies[0].exception()
        told = time.monotonic()
        again = [reply.result() for reply in [ref.ask(NcclRank.sum_of_ranks) for ref in refs]]
        whole = time.monotonic()
        met = refs[0].ask(NcclRank.last_abort).result()
        after = refs[0].ask(NcclRank.where).result()
    return {
        "first_sums": first,
        "survivor_raised": type(error).__name__,
        "is_gang_aborted": isinstance(error, GangAborted),
        "check_raised_ms": ms(float(met["at"]) - killed),
        "told_to_caller_ms": ms(told - killed),
        "collective_itself_raised": met["raised"],
        "its_result_was_wrong": met["wrong"],
        "sums_again": again,
        "whole_again_ms": ms(whole - killed),
        "pid_kept": before[0] == after[0],
        "tensor_kept": before[2] == after[2],
        "epochs": [before[1], after[1]],
    }


def ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


if __name__ == "__main__":
    main()
