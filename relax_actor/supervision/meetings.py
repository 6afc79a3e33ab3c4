"""How the ranks of a gang's epoch come together: rank 0 opens where they meet, then the others are told.

The head only passes on what rank 0 says, and needs none of the libraries that meet there. What an older
epoch's rank 0 says leads nobody anywhere.
"""

from collections.abc import Callable

from relax_actor.actor import wire
from relax_actor.supervision.commands import GangAbort, Regroup


class Meetings:
    """The epochs whose rank 0 has not answered yet.

    Args:
        say: tells a rank, by its name and incarnation.
    """

    def __init__(self, say: Callable[[tuple[str, int], wire.Regroup], None]) -> None:
        self._say = say
        self._waiting: dict[str, list[Regroup]] = {}  # by gang; rank 0 first

    def regroup(self, command: Regroup) -> None:
        """Have a rank join a new epoch; the policy orders them by rank."""
        if command.rank == 0:
            self._waiting[command.gang] = [command]
            self._tell(command, "")
        else:
            self._waiting[command.gang].append(command)

    def opened(self, meeting: wire.Meeting) -> None:
        """Tell the other ranks where they meet, if their epoch is still to be."""
        said = meeting.name, meeting.incarnation, meeting.epoch
        for gang, (host, *others) in list(self._waiting.items()):
            if (host.name, host.incarnation, host.epoch) == said:
                del self._waiting[gang]
                for command in others:
                    self._tell(command, meeting.rendezvous)

    def abort(self, command: GangAbort) -> None:
        """Forget an epoch that broke before all had joined it."""
        for gang, ranks in list(self._waiting.items()):
            if ranks[0].epoch == command.epoch and command.name in {rank.name for rank in ranks}:
                del self._waiting[gang]

    def _tell(self, command: Regroup, rendezvous: str) -> None:
        order = wire.Regroup(epoch=command.epoch, rank=command.rank, size=command.size, rendezvous=rendezvous)
        self._say((command.name, command.incarnation), order)
