"""A queue that soon gives up."""

from relax_actor.roles.queue import TransferQueue


class ImpatientQueue(TransferQueue):
    """Gives up before a test does."""

    full_s = 0.5
