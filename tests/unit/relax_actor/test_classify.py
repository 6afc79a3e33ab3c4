"""How an end is named."""

import pytest

from relax_actor.actor.wire import Exited
from relax_actor.supervision.classify import classify, last_line
from relax_actor.supervision.events import ExitKind

ILLEGAL = """Traceback (most recent call last):
  File "train.py", line 9, in train
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
FULL = "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. CUDA error: 2"


def exited(code, signal, error, **more) -> Exited:
    return Exited(name="a", incarnation=1, code=code, signal=signal, error=error, **more)


@pytest.mark.parametrize(
    ("code", "signal", "error", "was_told", "kind"),
    [
        (0, None, "", False, ExitKind.NORMAL),
        (0, None, "", True, ExitKind.STOPPED),
        (None, 9, "", False, ExitKind.SIGNAL),
        (None, 9, "", True, ExitKind.STOPPED),
        (1, None, "Traceback\nValueError: x", False, ExitKind.ERROR),
        (1, None, ILLEGAL, False, ExitKind.DEVICE_LOST),
        (1, None, FULL, False, ExitKind.ERROR),
        (None, None, "fork: no memory", False, ExitKind.ERROR),
    ],
)
def test_an_end_is_named(code, signal, error, was_told, kind) -> None:
    assert classify(exited(code, signal, error), was_told=was_told).kind is kind


def test_evidence_of_memory_and_devices_comes_first() -> None:
    oom = classify(exited(None, 9, "", oom="oom_kill +1"), was_told=False)
    held = classify(exited(None, 9, "", held="gpu:0 still holds 9 MiB"), was_told=True)
    assert (oom.kind, oom.detail) == (ExitKind.OOM, "oom_kill +1")
    assert (held.kind, held.detail) == (ExitKind.DEVICE_LOST, "gpu:0 still holds 9 MiB")


def test_the_detail_is_the_last_line_and_bounded() -> None:
    assert classify(exited(1, None, "a\nb"), was_told=False).detail == "b"
    assert last_line("") == ""
    assert last_line("Traceback\nSpaceError: no room\n\nhint: free some\n") == "SpaceError: no room"
    assert last_line("\n\nhint: alone") == "hint: alone"
    assert len(last_line("x" * 10_000)) == 400
