"""Reward functions in processes that can be killed, so that none of them can stop a run.

A pool has a few slots; a slot is a thread that owns one worker process and hands it one task at a time.
It waits on a socket pair, with a deadline; the kernel closes the worker's end when the worker dies.

Invariants: a task gets exactly one outcome; a worker past its deadline is dead before its outcome is
told; a lost worker is replaced at once; `close` leaves no process behind, and neither does a SIGKILL of
ours (a worker asks the kernel to die with the thread that started it).

Refused: `concurrent.futures`, which cannot kill. `multiprocessing`, which imports the caller's
`__main__` again, or forks a process that has threads. `pebble.ProcessPool` 5.2.3: the death of one idle
worker breaks the whole pool, and its named semaphores stay in /dev/shm when the process group is killed.
"""

import contextlib
import queue
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future

import msgspec

from relax_actor.errors import RelaxError
from relax_actor.rewards.process import WorkerLostError, WorkerProcess, WorkerTimeoutError
from relax_actor.rewards.registry import RewardInput, check_name
from relax_actor.rewards.worker import Answer

_ATTEMPTS = 2  # the first death of a worker may be another's fault, such as the memory killer's


class RewardOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How scoring a sample went."""

    reward: float | None
    """Finite; None when rejected."""
    reason: str = ""
    """Why it was rejected, with function, row and sample; the first of its kind has the traceback."""
    seconds: float = 0.0
    """Time in the reward function."""


class RewardPool:
    """Scores samples in parallel processes.

    Args:
        function: `math`, `exact` or `module:function`.
        workers: processes.
        timeout_s: the longest a sample may take; then its process is killed.
        user_path: folder that goes to the END of the workers' sys.path, or nothing.

    Raises:
        RewardFunctionError: the function cannot be used; raised here, before the first task.
        RelaxError: a worker died or hung while it started.
    """

    def __init__(self, function: str, workers: int, timeout_s: float, user_path: str = "") -> None:
        check_name(function)
        self._function, self._timeout_s = function, timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._failures: Counter[str] = Counter()
        self._slots = [_Slot(WorkerProcess(function, user_path), self) for _ in range(workers)]
        self._start()

    def submit(self, task: RewardInput) -> Future[RewardOutcome]:
        """Queue a sample; its future never raises, unless `close` cancels it.

        Raises:
            RuntimeError: the pool is closed.
        """
        job = _Job(task)
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._jobs.put(job)
        return job.future

    @property
    def failures(self) -> dict[str, int]:
        """How often each kind of failure was met."""
        with self._lock:
            return dict(self._failures)

    @property
    def pids(self) -> list[int]:
        """The worker processes that are alive now."""
        return [pid for slot in self._slots if (pid := slot.worker.pid) is not None]

    def close(self) -> None:
        """Kill the workers and cancel what is not done; no process of the pool is left then."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._slots:
                self._jobs.put(None)
        for slot in self._slots:
            slot.worker.retire()
        for slot in self._slots:
            slot.join()

    def _start(self) -> None:
        for slot in self._slots:
            slot.start()
        try:
            for slot in self._slots:
                slot.ready.result()
        except BaseException:
            self.close()
            raise

    def _next_job(self) -> "_Job | None":
        """Return the next job to do, or None when the pool is closed."""
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.future.cancel()
            elif job.future.set_running_or_notify_cancel():
                return job
        return None

    def _outcome(self, worker: WorkerProcess, task: RewardInput) -> RewardOutcome:
        lost = ""
        for _ in range(_ATTEMPTS):
            try:
                worker.ensure_started()
                return self._judged(worker.ask(task, self._timeout_s), task)
            except WorkerTimeoutError as error:
                problem = f"exceeded {error.timeout_s:.1f} s"
                return self._rejected(task, Answer(problem=problem, kind="timeout", seconds=error.timeout_s))
            except WorkerLostError as error:
                lost = error.exit
            except (RelaxError, TypeError, ValueError) as error:
                return self._rejected(task, Answer(problem=f"could not be asked: {error}", kind=str(error)))
        problem = f"lost its process {_ATTEMPTS} times, at last by {lost},"
        return self._rejected(task, Answer(problem=problem, kind=f"process lost: {lost}"))

    def _judged(self, answer: Answer, task: RewardInput) -> RewardOutcome:
        if answer.problem:
            return self._rejected(task, answer)
        return RewardOutcome(reward=answer.reward, seconds=answer.seconds)

    def _rejected(self, task: RewardInput, answer: Answer) -> RewardOutcome:
        where = f"on {task.origin} (group {task.group_id}, sample {task.sample_index})"
        reason = f"reward function `{self._function}` {answer.problem} {where}"
        with self._lock:
            self._failures[answer.kind] += 1
            if self._failures[answer.kind] == 1 and answer.traceback:
                reason += f"\n{answer.traceback}"
        return RewardOutcome(reward=None, reason=reason, seconds=answer.seconds)


class _Job:
    """A task and the promise of its outcome."""

    def __init__(self, task: RewardInput) -> None:
        self.task = task
        self.future: Future[RewardOutcome] = Future()


class _Slot(threading.Thread):
    """Owns a worker; alive for as long as the pool, because the worker dies with this thread."""

    def __init__(self, worker: WorkerProcess, pool: RewardPool) -> None:
        super().__init__(name="reward-slot", daemon=True)
        self.worker, self._pool = worker, pool
        self.ready: Future[None] = Future()

    def run(self) -> None:
        """Start the worker, then score until the pool is closed."""
        try:
            self.worker.ensure_started()
        except BaseException as error:  # noqa: BLE001 - told to whoever makes the pool
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while (job := self._pool._next_job()) is not None:  # noqa: SLF001 - the slot is a part of the pool
            self._finish(job, self._pool._outcome(self.worker, job.task))  # noqa: SLF001 - the same
        self.worker.kill()

    def _finish(self, job: _Job, outcome: RewardOutcome) -> None:
        if self._pool._closed:  # noqa: SLF001 - what the retired worker's death looked like is no outcome
            job.future.set_exception(CancelledError())
            return
        job.future.set_result(outcome)
        with contextlib.suppress(RelaxError):
            self.worker.ensure_started()  # so that the next task need not wait for it
