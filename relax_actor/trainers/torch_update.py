"""How large one optimizer update was to be, and how large it is."""

from collections.abc import Sequence
from dataclasses import dataclass

from relax_actor.trainers.base import TrainSequence


@dataclass(kw_only=True)
class Update:
    """One optimizer update under way.

    Args:
        total_tokens: response tokens that it is to have.
        total_sequences: sequences that it is to have.
        is_estimate: whether these sizes are not known yet.
    """

    total_tokens: int
    total_sequences: int
    seen_tokens: int = 0
    seen_sequences: int = 0
    moving_sequences: int = 0
    is_estimate: bool = False

    def see(self, sequences: Sequence[TrainSequence]) -> None:
        """Count what it has, whether or not that can move the weights."""
        self.seen_tokens += sum(len(sequence.response) for sequence in sequences)
        self.seen_sequences += len(sequences)

    def factor(self, aggregation: str) -> float:
        """Return what the gradient is to be multiplied by: 1 where the sizes were right.

        Raises:
            ValueError: they were no estimate, and wrong.
        """
        if not self.is_estimate:
            self._require_complete()
            return 1.0
        if aggregation == "token_mean":
            return self.total_tokens / max(1, self.seen_tokens)
        return self.total_sequences / max(1, self.seen_sequences)

    def _require_complete(self) -> None:
        announced = (self.total_tokens, self.total_sequences)
        if (seen := (self.seen_tokens, self.seen_sequences)) != announced:
            raise ValueError(f"the update began with (tokens, sequences) {announced} and had {seen}")
