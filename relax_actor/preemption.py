"""How the head has a run make room: the trainer ends after the step at hand, and the run with it."""

import time

from relax_actor.actor.ref import Reply
from relax_actor.roles.trainer import Trainer
from relax_actor.supervision.supervisor import Supervisor

ANSWER_S = 10.0
"""How long the trainer may take to answer before it is asked again: it may have died, and be coming back."""


class Preemption:
    """Asks the trainer until it agrees, and has the tree stopped where it takes too long.

    Args:
        supervisor: of the run.
        grace_s: how long it may take.
    """

    def __init__(self, supervisor: Supervisor, grace_s: float) -> None:
        self._supervisor, self._grace_s = supervisor, grace_s
        self._deadline_s: float | None = None
        self._reply: Reply[bool] | None = None

    @property
    def is_granted(self) -> bool:
        """Whether the trainer has agreed to end before its last step."""
        reply = self._reply
        return reply is not None and reply.done() and reply.exception() is None and reply.result()

    def is_overdue(self) -> bool:
        """Do the next thing; to be called often. True once, when the tree was told to stop instead."""
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + self._grace_s
        if self._reply is None or (self._reply.done() and self._reply.exception() is not None):
            self._reply = self._supervisor.ref("trainer", Trainer).within(ANSWER_S).ask(Trainer.preempt)
        if now_s < self._deadline_s:
            return False
        self._supervisor.stop("it took too long to make room")
        return True
