"""How a rollout sleeps while the trainer has its GPU; see `gpu_turns` for what keeps them apart."""

import sys
import time
from collections.abc import Callable

from relax_actor.actor import Context
from relax_actor.config import Config
from relax_actor.dcs.replica import Replica
from relax_actor.engines.base import Engine
from relax_actor.faults import point
from relax_actor.roles.gpu_turns import FOLDER, RolloutTurn

LOOK_S = 0.02
"""How often a rollout looks whether the trainer wants the GPU, or is done with it."""

PATIENCE_FRAC = 0.25
"""The share of `run.colocate_sleep_s` in which samples in flight may end by themselves."""


def first_turn(config: Config, context: Context) -> RolloutTurn | None:
    """Wait until a new rollout may take memory; None where nobody takes turns."""
    if not config.run.colocate:
        return None
    turn = RolloutTurn(context.run_dir / FOLDER, context.name)
    since = time.monotonic()
    while not turn.try_take():
        context.progress("waits for its turn on the GPU")
        time.sleep(LOOK_S)
    context.events.emit("turn_began", waited_s=round(time.monotonic() - since, 3), wake_s=0.0)
    return turn


def goes_on(config: Config) -> bool:
    """Whether a sample that is gone on with is the one it would have been; see docs/concepts/sglang.md."""
    return config.rollout.engine != "sglang" or not config.rollout.deterministic


class Sleeping:
    """Looks when to sleep, and when to wake.

    Args:
        turn: which this rollout has; None: it never sleeps.
        engine: sleeps.
        weights: of the engine.
        context: of the rollout.
        config: the run's.
    """

    def __init__(
        self,
        turn: RolloutTurn | None,
        engine: Engine,
        weights: Replica,
        context: Context,
        config: Config,
    ) -> None:
        self._turn, self._engine, self._weights = turn, engine, weights
        self._events = context.events
        self._patience_s = PATIENCE_FRAC * config.run.colocate_sleep_s
        self._wanted_since: float | None = None
        if turn is not None:
            turn.be_ready()

    @property
    def look_s(self) -> float | None:
        """How soon to look again; None: never."""
        return None if self._turn is None else LOOK_S

    @property
    def is_wanted(self) -> bool:
        """Whether no new samples should be begun: the trainer waits."""
        return self._wanted_since is not None

    def is_awake(self, park: Callable[[], int]) -> bool:
        """Sleep or wake, if it is time to; return whether the engine may be used.

        Args:
            park: takes the samples in flight out of the engine; returns how many there were.
        """
        if self._turn is None:
            return True
        if not self._turn.is_mine:
            return self._wake(self._turn)
        if not self._turn.is_wanted():
            self._wanted_since = None  # a trainer that has died
            return True
        now = time.monotonic()
        self._wanted_since = now if self._wanted_since is None else self._wanted_since
        if self._engine.in_flight and now - self._wanted_since < self._patience_s:
            return True
        self._sleep(self._turn, park())
        return False

    def _sleep(self, turn: RolloutTurn, parked: int) -> None:
        point("falling_asleep")
        since = time.monotonic()
        frees = self._engine.sleep()
        _free_pool()
        self._weights.slept()
        self._events.emit(
            "turn_ended", sleep_s=round(time.monotonic() - since, 4), parked=parked, frees_memory=frees
        )
        self._wanted_since = None
        turn.give_up()
        point("asleep")

    def _wake(self, turn: RolloutTurn) -> bool:
        if not turn.try_take():
            return False
        point("waking")
        since = time.monotonic()
        self._engine.wake()
        self._events.emit("turn_began", waited_s=0.0, wake_s=round(time.monotonic() - since, 4))
        return True


def _free_pool() -> None:
    """Give what torch keeps of a GPU in this process, such as buckets on their way to a server, to others."""
    torch = sys.modules.get("torch")  # a process that has not imported it has none
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
