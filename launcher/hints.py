"""What to do about an actor's end, by how it ended. Pure."""

import signal

from launcher.lives import Life

_SIGNALS = {
    signal.SIGKILL: (
        "SIGKILL without a traceback is most often host memory: see memory.txt of the crash folder and "
        "`dmesg`; else somebody, or the batch system, killed it"
    ),
    signal.SIGSEGV: "native code crashed: its stacks are in the log; the newest frame names the library",
    signal.SIGABRT: "native code gave up: its last words are in the log",
    signal.SIGBUS: "a mapped file or /dev/shm is full or was cut: df -h /dev/shm",
    signal.SIGILL: "a library was built for another CPU: compare the host with those that work",
    signal.SIGFPE: "native code divided by zero: its stacks are in the log",
    signal.SIGTERM: "somebody, or the batch system, asked it to end: not the supervisor, which says so",
    signal.SIGUSR1: "it was asked for its stacks while it had no handler for that: see faulthandler.register",
}
_KINDS = {
    "oom": "lower what it keeps in memory, or give the host more; memory.txt has the numbers",
    "hang": "its stacks are in the log and in stacks.txt: the innermost frame is where it hung",
    "start_timeout": "raise start_timeout_s of its child spec if its constructor may take so long",
    "device_lost": "look at nvidia-smi and `dmesg` for an Xid; the device may have to be reset",
    "lease": "the node agent of its host ended or was not heard: its log, logs/agent*.log, says why",
}


def hint(life: Life, *, has_traceback: bool) -> str:
    """Return what a person may do about an end; empty where there is nothing to say.

    Args:
        life: one that is over.
        has_traceback: whether the actor wrote why it died.
    """
    if life.killed:
        return f"it was killed on purpose: {life.killed}"
    if known := _KINDS.get(life.kind):
        return known
    if life.signal is not None and life.kind != "stopped":
        return _SIGNALS.get(signal.Signals(life.signal), "") if life.signal in set(signal.Signals) else ""
    if has_traceback:
        return "the last line of the traceback is what was raised; the lines above lead to it"
    if life.code:
        return f"it left by itself with exit code {life.code}: some library called exit()"
    return ""
