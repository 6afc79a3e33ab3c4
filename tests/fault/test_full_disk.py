"""A disk that is really full: the queue stands still or says so, and what it has said is there."""

import os

import numpy as np
import pytest
from full_disk import ImpatientQueue
from loop_run import loop_config
from queue_rows import prompt, sample_of

from relax_actor import Backoff, ChildSpec, Intensity, Supervisor, SupervisorSpec
from relax_actor.ids import Holder
from relax_actor.protocol import Opened
from relax_actor.roles.queue import TransferQueue
from relax_actor.telemetry import read_events
from relax_actor.transfer_queue.events import SamplesPut
from relax_actor.transfer_queue.journal import read
from relax_actor.transfer_queue.memory import Memory, SpillError, spill_space
from relax_actor.transfer_queue.records import Put
from relax_actor.transfer_queue.storage import RowReader, RowWriter
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

HOLDER = Holder("rollout/0", 1)
SAMPLES = 64
"""Of a group: a put of all of them is longer than what may be left of the journal's last page."""


def fill(folder):
    """Leave no page free; return what is to be removed to make room."""
    ballast = folder / "ballast"
    stat = os.statvfs(folder)
    ballast.write_bytes(bytes(stat.f_bavail * stat.f_frsize))
    return ballast


class Scene:
    """A queue whose journal is on a small disk, with one group lent to a caller."""

    def __init__(self, config, disk, queue=TransferQueue):
        spec = SupervisorSpec(
            id="root",
            backoff=Backoff(base_s=0.01, cap_s=0.05),
            intensity=Intensity(restarts=0),
            children=(ChildSpec(id="queue", actor=queue, args={"config": config}),),
        )
        self.tree = Supervisor(spec, run_dir=disk / "run", zygotes={"default": ("numpy",)})

    def __enter__(self):
        self.tree.__enter__()
        self.queue = self.tree.ref("queue", TransferQueue).within(60.0)
        self.journal = self.tree.run_dir / f"queue-{self.tree.run_id}.journal"
        self.writer = RowWriter(ShmSpace(self.tree.run_id), HOLDER)
        self.queue.ask(TransferQueue.open, Opened(step=0, policy_version=1)).result()
        (tokens,) = self.writer.write([{"tokens": np.arange(4, dtype=np.int32)}])
        self.queue.ask(TransferQueue.submit, [prompt(0, tokens["tokens"], SAMPLES)]).result()
        leased = self.queue.ask(TransferQueue.lease_prompts, HOLDER, 1, [], SAMPLES, 5.0).result()
        (self.lease,) = leased.prompts
        return self

    def __exit__(self, *error):
        return self.tree.__exit__(*error)

    def put(self):
        refs = self.writer.write([{"tokens": np.arange(9, dtype=np.int32)}] * SAMPLES)
        samples = [sample_of(self.lease, index, each["tokens"]) for index, each in enumerate(refs)]
        return self.queue.ask(TransferQueue.put_samples, HOLDER, samples)


def config_of(tiny_model):
    return loop_config(
        tiny_model, rollout={"samples_per_prompt": SAMPLES}, train={"global_batch_size": SAMPLES}
    )


def test_a_full_disk_makes_the_queue_stand_still_until_there_is_room(small_disk, tiny_model):
    """Nobody is told what is not written; when there is room, it goes on as if nothing had been."""
    with Scene(config_of(tiny_model), small_disk) as scene:
        ballast = fill(small_disk)
        reply = scene.put()
        with pytest.raises(TimeoutError):
            reply.result(timeout=1.0)
        assert not [event for event in read(scene.journal) if isinstance(event, SamplesPut)]
        ballast.unlink()
        assert reply.result() == [Put.ACCEPTED] * SAMPLES
        (put,) = [event for event in read(scene.journal) if isinstance(event, SamplesPut)]
        assert len(put.samples) == SAMPLES
        events, _ = read_events(scene.tree.run_dir / "events.jsonl")
    assert "has no room" in next(event["reason"] for event in events if event["kind"] == "journal_full")


def test_a_disk_that_stays_full_ends_the_queue_with_the_reason(small_disk, tiny_model):
    """What it had said is in its journal, and nothing else."""
    with Scene(config_of(tiny_model), small_disk, ImpatientQueue) as scene:
        fill(small_disk)
        scene.put()
        finished = scene.tree.wait(60.0)
        assert finished is not None
        assert "the file system has no room" in finished.reason
        assert not [event for event in read(scene.journal) if isinstance(event, SamplesPut)]


def test_a_row_that_no_file_has_room_for_stays_in_memory(small_disk, tmp_path):
    """The error says why; with room it moves, and is the same."""
    (tmp_path / "shm").mkdir()
    space, spill = ShmSpace("0a1b2c3d", tmp_path / "shm"), spill_space("0a1b2c3d", small_disk)
    writer, reader = RowWriter(space, HOLDER), RowReader(space, spill)
    row = np.arange(50_000, dtype=np.int32)
    ref = writer.write([{"tokens": row}])[0]["tokens"]
    memory = Memory(space, spill, 1, [(0, ref)])
    ballast = fill(small_disk)
    with pytest.raises(SpillError, match="No space left on device"):
        memory.relieve([(0, ref)])
    assert space.exists(ref.segment)
    assert spill.names() == []
    assert reader.read(ref).tolist() == row.tolist()
    ballast.unlink()
    assert memory.relieve([(0, ref)]).segments == 1
    assert not space.exists(ref.segment)
    assert RowReader(space, spill).read(ref).tolist() == row.tolist()
    memory.free(ref.segment)
