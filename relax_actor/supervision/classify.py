"""What kind of end it was: from the kernel's word, and from what the actor wrote of its own death."""

from relax_actor.actor.wire import Exited
from relax_actor.supervision.events import Exit, ExitKind

_DEVICE_MARKS = ("DeviceLostError", "CUDA error", "AcceleratorError", "NCCL Error", "NVML")
"""What the last line of a traceback says where the device, not the code, failed for good."""

_NOT_LOST = ("OutOfMemoryError", "out of memory")
"""Device errors that leave the device as it was."""


def classify(exited: Exited, *, was_told: bool) -> Exit:
    """Say how an incarnation ended.

    Args:
        exited: what the node agent saw of it.
        was_told: whether it was asked to stop.
    """
    code, signal = exited.code, exited.signal
    if exited.held:
        return Exit(kind=ExitKind.DEVICE_LOST, signal=signal, detail=exited.held)
    if exited.oom:
        return Exit(kind=ExitKind.OOM, signal=signal, detail=exited.oom)
    if code == 0:
        return Exit(kind=ExitKind.STOPPED if was_told else ExitKind.NORMAL, code=0)
    if signal is not None:
        return Exit(kind=ExitKind.STOPPED if was_told else ExitKind.SIGNAL, signal=signal)
    kind = ExitKind.DEVICE_LOST if is_device_loss(exited.error) else ExitKind.ERROR
    return Exit(kind=kind, code=code, detail=last_line(exited.error))


def is_device_loss(error: str) -> bool:
    """Return whether a traceback's last lines say that the device is gone or poisoned."""
    tail = "\n".join(error.rstrip().splitlines()[-8:])  # CUDA errors explain themselves over several lines
    return any(mark in tail for mark in _DEVICE_MARKS) and not any(mark in tail for mark in _NOT_LOST)


def last_line(text: str) -> str:
    """Return the last line of a text that is not a hint, bounded in length."""
    fact, _, _ = text.rpartition("\n\nhint: ")
    lines = (fact or text).rstrip().splitlines()
    return lines[-1][:400] if lines else ""
