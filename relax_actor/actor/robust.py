"""A mutex in shared memory that tells of its holder's death, and the semaphore that says it is held.

The kernel walks a dying thread's list of robust mutexes before it tears the process' memory down, so whoever
waits for the mutex learns of the death in well under a millisecond, however many gigabytes the process holds:
pipes, sockets and pidfds tell only after the teardown. Both are glibc's, reached through ctypes, which
releases the interpreter lock while they wait.
"""

import ctypes
import errno
import os

MUTEX_BYTES = 64
"""Room for a `pthread_mutex_t` (40 bytes on x86-64, 48 on aarch64), aligned."""

SEMAPHORE_BYTES = 64
"""Room for a `sem_t` (32 bytes), aligned."""

_PROCESS_SHARED = 1
_ROBUST = 1
_libc = ctypes.CDLL(None, use_errno=True)


class RobustMutex:
    """A process-shared robust mutex in somebody's memory.

    Args:
        memory: at least `MUTEX_BYTES`, writable, shared by all who use it; kept alive by this object.
        offset: where in it, a multiple of 8.
    """

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._at = _at(memory, offset, MUTEX_BYTES)

    def initialise(self) -> None:
        """Make it, once, before anyone else sees the memory."""
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._at, attributes))

    def lock(self) -> bool:
        """Wait for it and hold it.

        Returns:
            Whether the thread that held it before has died with it.

        Raises:
            OSError: it cannot be had, for example because a death was never made good.
        """
        code = _libc.pthread_mutex_lock(self._at)
        if code == errno.EOWNERDEAD:
            return True
        _check(code)
        return False

    def unlock(self) -> None:
        """Let go; after a death that `lock` told of, nobody can hold it again."""
        _check(_libc.pthread_mutex_unlock(self._at))


class Semaphore:
    """A process-shared semaphore in somebody's memory, at 0 to begin with; see `RobustMutex`."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._at = _at(memory, offset, SEMAPHORE_BYTES)

    def initialise(self) -> None:
        """Make it, once, before anyone else sees the memory."""
        _check(_libc.sem_init(self._at, _PROCESS_SHARED, 0) and ctypes.get_errno())

    def post(self) -> None:
        """Let one waiter through."""
        _check(_libc.sem_post(self._at) and ctypes.get_errno())

    def wait(self) -> None:
        """Return once somebody has posted."""
        while _libc.sem_wait(self._at) != 0:
            if ctypes.get_errno() != errno.EINTR:
                _check(ctypes.get_errno())


def _at(memory: memoryview, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_buffer(memory, offset)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
