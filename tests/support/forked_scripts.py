"""Scripts as processes of their own, forked instead of started: milliseconds, not a new interpreter."""

import os
import signal
import sys


class ForkedScript:
    """A script that runs in a fork of the test's process; no clean-up of the test's runs in it.

    Args:
        source: what it runs.
        arguments: its `sys.argv[1:]`.
        env: added to its environment.

    Attributes:
        pid: of the process.
        stdin: text to it.
        stdout: text from it.
    """

    def __init__(self, source: str, arguments: list[str], env: dict[str, str]) -> None:
        to_read, self_write = os.pipe()
        self_read, to_write = os.pipe()
        code = compile(source, "<script>", "exec")
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.dup2(to_read, 0)
                os.dup2(to_write, 1)
                os.closerange(3, 256)
                sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
                sys.argv = ["-c", *arguments]
                os.environ |= env
                exec(code, {"__name__": "__main__"})  # noqa: S102 - the test's own text
                sys.stdout.flush()
                status = 0
            finally:
                os._exit(status)
        os.close(to_read)
        os.close(to_write)
        self.stdin, self.stdout = os.fdopen(self_write, "w"), os.fdopen(self_read, "r")
        self._status: int | None = None

    def wait(self) -> int:
        """Return the exit code, negative for a signal."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and leave nothing of it."""
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()
