"""However fast producers are, what lies in the queue is bounded by its window."""

import numpy as np
from queue_rows import prompt, sample_of

from relax_actor.ids import Holder
from relax_actor.protocol import BatchTrained, RewardReady
from relax_actor.transfer_queue.intake import Intake
from relax_actor.transfer_queue.ledger import Ledger, LedgerConfig
from relax_actor.transfer_queue.memory import Memory, spill_space
from relax_actor.transfer_queue.records import Put
from relax_actor.transfer_queue.storage import RowWriter
from transport.shm import ShmSpace

ROLLOUT, REWARD, TRAINER = Holder("rollout/0", 1), Holder("reward/0", 1), Holder("trainer", 1)
SAMPLES, TOKENS, STEPS = 4, 1000, 30
SAMPLE_BYTES = 3 * 4 * TOKENS
CONFIG = LedgerConfig(
    groups_per_batch=2,
    samples_per_prompt=SAMPLES,
    max_staleness=2,
    total_groups=2 * STEPS,
    min_valid_samples=1,
    max_attempts=1,
    prompt_lease_s=9.0,
    reward_lease_s=9.0,
    batch_lease_s=9.0,
    group_deadline_s=9.0,
)


class Fast:
    """A producer that puts all it is let, and a consumer that takes one batch in ten turns."""

    def __init__(self, folder):
        (folder / "shm").mkdir()
        space = ShmSpace("0a1b2c3d", folder / "shm")
        self.ledger = Ledger(CONFIG)
        self.ledger.published(0, 0.0)
        self.memory = Memory(space, spill_space("0a1b2c3d", folder), 1 << 30)
        self.intake = Intake(space, self.ledger, self.memory)
        self.writer, self.shm = RowWriter(space, ROLLOUT), folder / "shm"
        self.version = 0

    def produce(self):
        row = {"tokens": np.zeros(TOKENS, np.int32)}
        wanted = self.ledger.upcoming()
        refs = self.writer.write([{"tokens": np.zeros(4, np.int32)} for _ in wanted])
        groups = [
            prompt(group_id, ref["tokens"], SAMPLES) for group_id, ref in zip(wanted, refs, strict=True)
        ]
        self.intake.prompts(groups, 0.0)
        for lease in self.ledger.lease_prompts(ROLLOUT, self.version, SAMPLES, 0.0):
            rows = self.writer.write([{"tokens": row["tokens"], "logprobs": row["tokens"].astype(np.float32),
                                       "versions": row["tokens"]} for _ in lease.missing])  # fmt: skip
            samples = [
                sample_of(lease, index, **refs) for index, refs in zip(lease.missing, rows, strict=True)
            ]
            assert self.intake.samples(samples, ROLLOUT, 0.0) == [Put.ACCEPTED] * len(samples)
        rewards = [
            RewardReady(
                group_id=task.group_id, sample_index=task.sample_index, lease_id=task.lease_id, reward=1.0
            )
            for task in self.ledger.lease_rewards(REWARD, 99, 0.0)
        ]
        self.ledger.put_rewards(rewards, REWARD, 0.0)

    def consume(self):
        batch = self.ledger.lease_batch(TRAINER, self.version, 0.0)
        self.version += 1
        trained = BatchTrained(lease_id=batch.lease_id, step=self.version, policy_version=self.version)
        assert self.ledger.ack_batch(trained, TRAINER, 0.0) is Put.ACCEPTED
        for segment in self.ledger.take_freed():
            self.memory.free(segment)

    def shm_bytes(self):
        files = {stat.st_ino: stat.st_blocks * 512 for stat in (each.stat() for each in self.shm.iterdir())}
        return sum(files.values())


def test_a_producer_ten_times_faster_than_its_consumer_fills_only_the_window(tmp_path):
    """Bytes that are needed, and bytes of memory, after every turn of the producer."""
    fast, needed, resident = Fast(tmp_path), [], []
    for _ in range(STEPS):
        for _ in range(10):
            fast.produce()
            needed.append(fast.memory.nbytes)
            resident.append(fast.shm_bytes())
        fast.consume()
    window_bytes = CONFIG.window * SAMPLES * SAMPLE_BYTES
    prompts_bytes = 2 * CONFIG.window * 16  # those written together go together
    assert window_bytes < max(needed) <= window_bytes + prompts_bytes, "full, and not more"
    assert max(resident[len(resident) // 2 :]) <= max(resident[: len(resident) // 2]), (
        "and memory stays as it is"
    )
    assert fast.memory.nbytes == 0
