"""Where the actors of a run are: which host, and which of its GPUs. Records only; `launcher` makes them."""

import msgspec

from relax_actor.errors import RelaxError


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One actor's place."""

    actor: str  # as in `relax-actor ps`: `trainer`, `rollout/3`
    host: str
    gpus: tuple[str, ...] = ()  # numbers or UUIDs, as CUDA_VISIBLE_DEVICES of that host names them


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Every actor's place. The first host has the queue, the prompts, the rewards and the trainer."""

    hosts: tuple[str, ...]
    seats: tuple[Seat, ...]
    spares: tuple[Seat, ...] = ()  # `actor` is empty: where a rollout may go whose host is lost

    def seat(self, actor: str) -> Seat:
        """Return an actor's place.

        Raises:
            UnplacedError: it has none.
        """
        for seat in self.seats:
            if seat.actor == actor:
                return seat
        raise UnplacedError(actor)


class UnplacedError(RelaxError):
    """An actor that a placement says nothing of."""

    def __init__(self, actor: str) -> None:
        self.actor = actor
        super().__init__(f"the placement says nothing of {actor}")
