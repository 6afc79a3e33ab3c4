"""The process above the node agent: it ends an agent whose lease is over, and all that an agent leaves.

`python -P -m relax_actor.node` reads its configuration from standard input and forks; the child is the agent.
The parent then waits for one of two things:

- the agent ended, whichever way: whatever it leaves becomes this process' child (a subreaper) and is killed;
- the lease is over, for want of the head's grant or because the agent was stopped: the agent is killed.

So when this process has ended, nothing of the run is left on its host, and its exit code is proof of it. It
has one thread, does nothing else, and cannot be busy. If it is itself killed, the kernel kills the agent,
and with it the actors.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from relax_actor.actor.wire import NodeConfig
from relax_actor.limits import raise_open_files
from relax_actor.node import agent, cgroup, early, process, remains
from relax_actor.node.names import END_NOW, EXIT_FENCED
from relax_actor.node.renewal import LeaseEnd
from transport.clock import BootClock
from transport.shm import ShmSpace

EXIT_AGENT_DIED = 70

SWEEP_DEADLINE_S = 30.0


def main() -> None:
    """Read the configuration, run the agent, and leave once nothing is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    length = int.from_bytes(sys.stdin.buffer.read(4), "little")
    config = _settled(msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=NodeConfig))
    head = os.pidfd_open(config.head_pid) if os.getppid() == config.head_pid else -1
    early.keep_from_children(config.early)
    process.become_subreaper()
    raise_open_files()
    until = LeaseEnd()
    until.at_s = BootClock().monotonic() + config.join_timeout_s
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {END_NOW})  # until there is somebody to kill
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {END_NOW})
        _be_agent(keeper, config, until, head)
    code = _keep(pid, until, config.lease.renew_s)
    _sweep(config)
    cgroup.Cgroups(cgroup.root(config.run_id, pid)).close()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own clean-up would take tens of milliseconds more


def _settled(config: NodeConfig) -> NodeConfig:
    """Make the folders the host's processes write to, and say where they are; claim them for this run."""
    for folder in ("logs", "crash"):
        (Path(config.run_dir) / folder).mkdir(parents=True, exist_ok=True)
    name = Path(config.socket_dir).name or f"{config.run_id}-{config.host}"
    socket_dir, _held_for_life = remains.claim(name, config.run_id, config.shm_root)
    return msgspec.structs.replace(config, socket_dir=str(socket_dir))


def _be_agent(keeper: int, config: NodeConfig, until: LeaseEnd, head: int) -> None:
    code = 1
    try:
        process.die_with_parent(keeper)
        code = agent.main(config, until, head)
    except BaseException:  # noqa: BLE001 - the fork must not return into `main`
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _keep(pid: int, until: LeaseEnd, look_s: float) -> int:
    """Wait for the agent's end, or bring it about; return the exit code for it."""

    def forward(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if number == END_NOW else number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(END_NOW, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {END_NOW})
    is_fenced = _wait_or_fence(os.pidfd_open(pid), until, look_s)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if is_fenced:
        return EXIT_FENCED
    return status if status >= 0 else EXIT_AGENT_DIED


def _wait_or_fence(pidfd: int, until: LeaseEnd, look_s: float) -> bool:
    """Say whether the agent had to be killed. The end may come nearer: a lease is shorter than a start."""
    clock, poll = BootClock(), select.poll()
    poll.register(pidfd, select.POLLIN)
    while not poll.poll(max(0.0, min(until.at_s - clock.monotonic(), look_s)) * 1000):
        if clock.monotonic() >= until.at_s:
            print("the lease is over: killing the node agent", file=sys.stderr, flush=True)  # noqa: T201
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return True
    return False


def _sweep(config: NodeConfig) -> None:
    process.end_children(SWEEP_DEADLINE_S)
    if config.is_remote or _is_at_end(sys.stdin.fileno()):  # else the head runs on, here, and starts another
        ShmSpace(config.run_id, config.shm_root).sweep()
        shutil.rmtree(config.socket_dir, ignore_errors=True)


def _is_at_end(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
