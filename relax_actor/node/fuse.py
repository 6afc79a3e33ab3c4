"""A timer of the kernel's that kills this process unless it is set again in time: it needs nobody's help.

It kills a process that is stopped, whose interpreter lock is held, or that lost its keeper; and since it
counts CLOCK_BOOTTIME, at once when a machine wakes that was suspended past the moment. A fork has none.
"""

import ctypes
import os
import signal
import time

_ABSOLUTE = 1  # TIMER_ABSTIME
_SIGEV_SIGNAL = 0
_EVENT_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * (_EVENT_BYTES - ctypes.sizeof(ctypes.c_void_p) - 8)),
    )


class _Times(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns"))


class Fuse:
    """A fuse that is not lit yet.

    Raises:
        OSError: the kernel gives no timer, or the C library has none.
    """

    def __init__(self) -> None:
        self._timer = ctypes.c_void_p()
        event = _Event(signo=signal.SIGKILL, notify=_SIGEV_SIGNAL)
        try:
            code = _libc.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer))
        except AttributeError as error:  # before glibc 2.34 it was in a library of its own
            raise OSError(str(error)) from error
        _check(code)

    def light(self, at_s: float) -> None:
        """Have this process killed at `at_s`, CLOCK_BOOTTIME seconds, instead of when it was to be before."""
        whole_s = int(at_s)
        times = _Times(at_s=whole_s, at_ns=int((at_s - whole_s) * 1e9) or 1)  # 0 would put it out
        _check(_libc.timer_settime(self._timer, _ABSOLUTE, ctypes.byref(times), None))


def _check(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
