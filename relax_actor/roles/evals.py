"""Which evaluations are due, under way and done: the queue's second book, beside the ledger.

A round is the evaluation after a step; its prompts are in the ledger like any others, and its result is
their mean reward once all of them are settled.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from relax_actor.config import Config
from relax_actor.ids import GroupId
from relax_actor.protocol import Purpose
from relax_actor.transfer_queue.events import BatchAcked, EvalReported, Event, Rewound, Submitted
from relax_actor.transfer_queue.ledger import Ledger
from relax_actor.transfer_queue.records import EvalResult


class EvalRounds:
    """Rounds by the step they follow.

    Args:
        config: the run's.
        past: the journal's events, from which a restarted queue knows what is under way.
    """

    def __init__(self, config: Config, past: Iterable[Event] = ()) -> None:
        self._config = config
        self._wanted: list[int] = []
        self._seen: set[int] = set()
        self._left: dict[int, set[GroupId]] = {}
        for event in past:
            self._recall(event)
        self._left = {step: left for step, left in self._left.items() if left}

    @property
    def wanted(self) -> tuple[int, ...]:
        """Rounds whose prompts are to be put."""
        return tuple(self._wanted)

    @property
    def open(self) -> bool:
        """Whether a round is due or under way."""
        return bool(self._wanted or self._left)

    def want(self, step: int) -> None:
        """Have the policy evaluated as it is after `step`, once."""
        if self._config.eval.path and self._config.eval.every and step not in self._seen:
            self._seen.add(step)
            self._wanted.append(step)

    def want_after(self, step: int) -> None:
        """Have it evaluated if that is due after `step`."""
        every = self._config.eval.every
        if every and (step % every == 0 or step == self._config.run.steps):
            self.want(step)

    def submitted(self, step: int, groups: Sequence[GroupId]) -> None:
        """All prompts of the round are in the ledger."""
        if step in self._wanted:
            self._wanted.remove(step)
            self._left[step] = set(groups)

    def finished(self, ledger: Ledger) -> list[dict[str, Any]]:
        """Return the fields of an `eval` event for every round that is done.

        A round stays in the ledger until all of it is settled, so that a queue that dies meanwhile loses none
        of it; one that dies right after this reports the round again.
        """
        done = [step for step, left in self._left.items() if left <= ledger.finished_evals]
        results = {step: ledger.eval_results(self._left.pop(step)) for step in done}
        return [_summary(step, found) for step, found in results.items() if found]

    def _recall(self, event: Event) -> None:
        if isinstance(event, Submitted) and event.group.purpose is Purpose.EVAL:
            step = event.group.eval_round
            if step in self._wanted:
                self._wanted.remove(step)
            self._seen.add(step)
            self._left.setdefault(step, set()).add(event.group.group_id)
        elif isinstance(event, EvalReported):
            for left in self._left.values():
                left.discard(event.group_id)
        elif isinstance(event, BatchAcked):
            self.want_after(event.trained.step)
        elif isinstance(event, Rewound) and event.trained.groups == 0:
            self.want(0)


def _summary(step: int, results: list[EvalResult]) -> dict[str, Any]:
    rewards = [reward for result in results for reward in result.rewards]
    versions = [result.policy_version for result in results if result.policy_version is not None]
    return {
        "eval_set": results[0].eval_set,
        "step": step,
        "policy_version": min(versions, default=None),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "samples": len(rewards),
        "missing": sum(result.missing for result in results),
    }
