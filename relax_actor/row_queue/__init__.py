"""The TransferQueue for any fields and any consumers: rows by columns, each delivered once to each group.

Read `spec` for what a queue is told, `records` for what producers, queue and consumers say, `table` for the
decisions (pure), `blocks` for the bytes, `actor` for the process, `client` for the two ends.
"""

from relax_actor.row_queue.actor import RowQueue
from relax_actor.row_queue.client import Batch, RowConsumer, RowProducer
from relax_actor.row_queue.spec import ConsumerGroup, Fifo, QueueSpec, TokenBudget, WholeGroups

__all__ = [
    "Batch",
    "ConsumerGroup",
    "Fifo",
    "QueueSpec",
    "RowConsumer",
    "RowProducer",
    "RowQueue",
    "TokenBudget",
    "WholeGroups",
]
