"""A placement knows where everybody is, and says whom it does not know."""

import pytest

from relax_actor.placement import Placement, Seat, UnplacedError

PLACEMENT = Placement(
    hosts=("a", "b"), seats=(Seat(actor="trainer", host="a", gpus=("0",)), Seat(actor="rollout/0", host="b"))
)


def test_a_seat_is_found_by_its_actor():
    assert PLACEMENT.seat("rollout/0").host == "b"
    assert PLACEMENT.seat("trainer").gpus == ("0",)


def test_an_actor_without_a_seat_is_named():
    with pytest.raises(UnplacedError, match="rollout/1"):
        PLACEMENT.seat("rollout/1")
