"""A program that decides about failures itself, watches an actor, and may be interrupted at any time.

    python examples/embedded/stubborn.py

A worker crashes on every third job. The program's own `on_failure` restarts it twice and then leaves it
down; a monitor tells what became of each incarnation. Ctrl-C at any point ends the tree within two seconds.
"""

from relax_actor import Actor, Backoff, ChildSpec, Decision, Failure, Supervisor, SupervisorSpec, endpoint
from relax_actor.errors import ActorError

ALLOWED_RESTARTS = 2


class Worker(Actor):
    """Does jobs, but not for long."""

    fatal = (MemoryError,)  # after this one the process is replaced

    def __init__(self) -> None:
        self.done = 0

    @endpoint(idempotent=True, max_runtime_s=5.0)  # a job that never began is sent again
    def work(self, job: int) -> str:
        self.done += 1
        if self.done == 3:
            raise MemoryError(f"job {job} is one too many")
        return f"job {job} done by incarnation {self.ctx.incarnation}"


def decide(failure: Failure) -> Decision:
    """Say what follows from a failure; called once for each incarnation that failed."""
    return Decision.RESTART if failure.restarts < ALLOWED_RESTARTS else Decision.IGNORE


def main() -> None:
    spec = SupervisorSpec(
        id="jobs", backoff=Backoff(base_s=0.05), children=(ChildSpec(id="worker", actor=Worker),)
    )
    with Supervisor(spec, on_failure=decide, stop_total_s=2.0) as tree:
        monitor = tree.monitor("worker")
        worker = tree.ref("worker", Worker).within(6.0)
        for job in range(10):
            try:
                print(worker.ask(Worker.work, job).result())
            except ActorError as error:
                print(f"job {job} failed: {type(error).__name__}")
    print("; ".join(str(seen) for seen in monitor))


if __name__ == "__main__":
    main()
