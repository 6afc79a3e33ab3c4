"""What the queue refuses its callers with."""

from relax_actor.errors import RelaxError
from relax_actor.ids import LeaseId


class HopelessRunError(RelaxError):
    """Group after group was dropped: no batch will ever be complete."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the run is hopeless: {reason}")


class StaleBatchError(RelaxError):
    """The trainer acknowledged a batch that is no longer its own: it must go back to a checkpoint."""

    def __init__(self, lease_id: LeaseId, step: int) -> None:
        self.lease_id, self.step = lease_id, step
        super().__init__(f"step {step} was trained on batch lease {lease_id}, which had ended")
