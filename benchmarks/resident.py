"""Does a queue get slower with what lies in it? One batch leased and acknowledged, at 1,000 and 65,000 rows.

    python benchmarks/resident.py

The decisions alone, in one process: the loop's ledger, and the table of `relax_actor.row_queue`. Both sizes
are there at the same time and are measured in turn, so that a busy machine slows both.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import write

from relax_actor.ids import Holder
from relax_actor.protocol import (
    BatchTrained,
    FinishReason,
    PromptGroup,
    RewardReady,
    SampleReady,
    TensorRef,
)
from relax_actor.row_queue.records import Column
from relax_actor.row_queue.spec import ConsumerGroup, QueueSpec, WholeGroups
from relax_actor.row_queue.table import Table
from relax_actor.transfer_queue.ledger import Ledger, LedgerConfig

ROWS = (1_000, 65_000)
GROUP_ROWS = 8
LIMIT = 1.3
ROLLOUT, REWARD, TRAINER = Holder("rollout/0", 1), Holder("reward/0", 1), Holder("trainer", 1)
REF = TensorRef("rows", 0, "int32", (1,))

Turn = Callable[[], float]
"""Leases and acknowledges eight rows and puts eight others; returns the seconds of the former."""


def main() -> None:
    """Measure both queues."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=400)
    turns = parser.parse_args().turns
    write(
        "resident", {"limit": LIMIT} | {each.__name__: measured(each, turns) for each in (ledger, row_table)}
    )


def measured(queue: Callable[[int], Turn], turns: int) -> dict[str, Any]:
    """Return the median of a turn at each size, and of the ratio of neighbours in time."""
    small, large = (queue(rows) for rows in ROWS)
    pairs = [(small(), large()) for _ in range(turns)]
    few, many = (statistics.median(pair[size] for pair in pairs) for size in (0, 1))
    return {
        "lease_and_ack_us": [round(few * 1e6, 1), round(many * 1e6, 1)],
        "rows": ROWS,
        "ratio": round(many / few, 3),
    }


def ledger(rows: int) -> Turn:
    """Return a turn of the loop's ledger, with as many scored rows in it."""
    queue, step = Ledger(_limits(rows // GROUP_ROWS)), 0
    queue.published(1, 0.0)
    while queue.room():
        _bring(queue)

    def turn() -> float:
        nonlocal step
        step += 1
        since = time.perf_counter()
        batch = queue.lease_batch(TRAINER, 1, 0.0)
        if batch is None:
            raise RuntimeError(queue.waiting_on())
        queue.ack_batch(BatchTrained(lease_id=batch.lease_id, step=step, policy_version=1), TRAINER, 0.0)
        took = time.perf_counter() - since
        _bring(queue)
        queue.take_events()
        return took

    return turn


def row_table(rows: int) -> Turn:
    """Return a turn of a row queue's table."""
    group = ConsumerGroup(name="train", needs=("tokens",), sampler=WholeGroups())
    table, seq = Table(QueueSpec(fields=("tokens",), groups=(group,))), 0

    def put() -> None:
        nonlocal seq
        seq += 1
        column = Column(f"s{seq}", 0, "int32", (), (1,) * GROUP_ROWS)
        table.put(ROLLOUT, seq, {"tokens": column}, [seq] * GROUP_ROWS, GROUP_ROWS)
        table.take_events()

    for _ in range(rows // GROUP_ROWS):
        put()

    def turn() -> float:
        since = time.perf_counter()
        dealt = table.lease("train", TRAINER, GROUP_ROWS, 0.0)
        if dealt is None:
            raise RuntimeError("no rows are ready")
        table.ack([dealt.lease_id], TRAINER)
        took = time.perf_counter() - since
        put()
        table.take_freed()
        return took

    return turn


def _limits(groups: int) -> LedgerConfig:
    return LedgerConfig(
        groups_per_batch=1,
        samples_per_prompt=GROUP_ROWS,
        max_staleness=groups - 1,
        total_groups=1 << 30,
        min_valid_samples=1,
        max_attempts=1,
        prompt_lease_s=9.0,
        reward_lease_s=9.0,
        batch_lease_s=9.0,
        group_deadline_s=9.0,
    )


def _bring(queue: Ledger) -> None:
    """Bring one group up to where it can be trained on."""
    prompt = PromptGroup(
        group_id=queue.next_group(), tokens=REF, samples=GROUP_ROWS, label="", origin="rows:1"
    )
    queue.submit(prompt, 0.0)
    (lease,) = queue.lease_prompts(ROLLOUT, 1, GROUP_ROWS, 0.0)
    samples = [
        SampleReady(
            group_id=prompt.group_id,
            sample_index=index,
            lease_id=lease.lease_id,
            tokens=REF,
            logprobs=REF,
            versions=REF,
            oldest_version=1,
            newest_version=1,
            finish_reason=FinishReason.STOP,
        )
        for index in lease.missing
    ]
    queue.put_samples(samples, ROLLOUT, 0.0)
    rewards = [
        RewardReady(
            group_id=task.group_id, sample_index=task.sample_index, lease_id=task.lease_id, reward=1.0
        )
        for task in queue.lease_rewards(REWARD, GROUP_ROWS, 0.0)
    ]
    queue.put_rewards(rewards, REWARD, 0.0)
    queue.take_freed()
    queue.take_events()


if __name__ == "__main__":
    main()
