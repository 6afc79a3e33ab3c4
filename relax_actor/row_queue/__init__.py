"""The TransferQueue for any fields and any consumers: rows by columns, each delivered once to each group.

Read `spec` for what a queue is told, `records` for what producers, queue and consumers say, `table` for the
decisions (pure), `blocks` for the bytes, `actor` for the process, `producer` and `consumer` for the two ends.
"""

from relax_actor.row_queue.actor import RowQueue
from relax_actor.row_queue.batch import Batch
from relax_actor.row_queue.consumer import RowConsumer
from relax_actor.row_queue.producer import PutRefusedError, RowProducer
from relax_actor.row_queue.spec import ConsumerGroup, Fifo, QueueSpec, TokenBudget, WholeGroups
from relax_actor.row_queue.ways import NoWayError, RowsNotCarriedError

__all__ = [
    "Batch",
    "ConsumerGroup",
    "Fifo",
    "NoWayError",
    "PutRefusedError",
    "QueueSpec",
    "RowConsumer",
    "RowProducer",
    "RowQueue",
    "RowsNotCarriedError",
    "TokenBudget",
    "WholeGroups",
]
