"""How the trainer has the GPU for itself while it trains; see `gpu_turns` for what keeps it apart."""

import time

from relax_actor.actor import Context
from relax_actor.config import Config
from relax_actor.faults import point
from relax_actor.roles.feed import Waiting
from relax_actor.roles.gpu_turns import FOLDER, TRAINER, TrainerTurn
from relax_actor.roles.step_stats import StepStats
from relax_actor.trainers.base import TrainerBackend

LOOK_S = 0.002


class TrainingTurn:
    """Takes the turn for each batch, where there are turns.

    Args:
        config: the run's.
        backend: whose memory moves; it is in host memory now.
        context: of the trainer.
    """

    def __init__(self, config: Config, backend: TrainerBackend, context: Context) -> None:
        self._backend, self._context = backend, context
        self._sleep_s = config.run.colocate_sleep_s
        self._turn = TrainerTurn(context.run_dir / FOLDER) if config.run.colocate else None
        self._is_ours = False

    def begin(self, stats: StepStats) -> Waiting[None]:
        """Wait until all rollouts sleep, and bring weights and optimizer onto the GPU."""
        if self._turn is None:
            return
        since = time.monotonic()
        ends_at, late = since + self._sleep_s, set[str]()
        while awake := self._turn.try_take():
            if time.monotonic() >= ends_at:
                ends_at = time.monotonic() + self._sleep_s
                self._end_late(self._turn, awake, late)
            time.sleep(LOOK_S)
            yield None
        taken, self._is_ours = time.monotonic(), True
        self._context.events.emit("turn_began", waited_s=round(taken - since, 4))
        point("turn_taken")
        self._backend.onload()
        stats.turn(sleep_s=taken - since, onload_s=time.monotonic() - taken)

    def offload(self, stats: StepStats) -> None:
        """Free the GPU's memory."""
        if self._is_ours:
            since = time.monotonic()
            self._backend.offload()
            stats.turn(offload_s=time.monotonic() - since)
            point("offloaded")

    def end(self) -> None:
        """Let the rollouts wake: what they are to install is published."""
        if self._turn is not None and self._is_ours:
            self._context.events.emit("turn_ended")
            self._is_ours = False
            self._turn.give_up()
            point("turn_given_up")

    def _end_late(self, turn: TrainerTurn, awake: tuple[str, ...], late: set[str]) -> None:
        """Kill who could sleep and does not; tell once of those that cannot yet."""
        for name in awake:
            pid = 0 if name == TRAINER else turn.end(name)
            if pid or name not in late:
                reason = f"did not free its memory within {self._sleep_s:g} s" + (
                    "" if pid else ": it starts"
                )
                self._context.events.emit("turn_late", rollout=name, killed_pid=pid, reason=reason)
            late.add(name)
