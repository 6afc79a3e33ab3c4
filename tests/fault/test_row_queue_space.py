"""A row queue without room: for its journal, for files, for rows; and rows larger than small integers say."""

import contextlib
import os
import subprocess
import threading
from collections import Counter

import numpy as np
import pytest
from row_hosts import tokens
from watching import eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.row_queue import ConsumerGroup, QueueSpec, RowConsumer, RowProducer, RowQueue
from relax_actor.row_queue.blocks import Layout
from relax_actor.row_queue.both import blocking
from relax_actor.row_queue.records import Column
from relax_actor.row_queue.ways import Outside, Remote
from relax_actor.telemetry import read_events
from relax_actor.transfer_queue.parcels import ParcelTooLargeError
from transport.shm import SegmentSpaceError, ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

GROUPS = (ConsumerGroup(name="train", needs=("tokens",)),)
FIELDS = ("tokens",)


@contextlib.contextmanager
def tiny(folder, size):
    """Mount a file system of its own on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def running(tmp_path, spec, *, journal_dir="", **options):
    queue = ChildSpec(id="queue", actor=RowQueue, args={"spec": spec, "journal_dir": str(journal_dir)})
    root = SupervisorSpec(id="root", children=(queue,))
    with Supervisor(root, run_dir=tmp_path / "run", zygotes={"default": ("numpy",)}, **options) as tree:
        yield tree


def events(tree, kind):
    return [event for event in read_events(tree.run_dir / "events.jsonl")[0] if event["kind"] == kind]


def got(consumer, rows):
    """Get and acknowledge so many rows; return how often each came."""
    seen = Counter()
    while seen.total() < rows:
        batch = consumer.get(60.0)
        assert batch is not None, seen
        seen.update(int(view[0]) for view in batch.views("tokens"))
        consumer.ack(batch)
        consumer.flush()
        del batch
    return seen


def test_a_put_waits_where_the_journal_has_no_room_and_nothing_is_lost(tmp_path):
    """Also if the queue dies before there is some: who was not answered asks again."""
    rows = 40
    with tiny(tmp_path / "journal", "64k") as folder:
        spec = QueueSpec(fields=FIELDS, groups=GROUPS)
        with running(tmp_path, spec, journal_dir=folder) as tree:
            producer = RowProducer.of(tree, "queue")
            producer.put({"tokens": [tokens(0)]})
            filler = folder / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            putting = threading.Thread(
                target=lambda: [producer.put({"tokens": [tokens(n)] * 1}) for n in range(1, rows)]
            )
            putting.start()
            eventually(lambda: events(tree, "journal_full"))
            os.kill(tree.pid("queue"), 9)
            eventually(lambda: len(events(tree, "journal_full")) > 1)
            assert putting.is_alive()
            filler.unlink()
            putting.join(60.0)
            assert not putting.is_alive()
            assert got(RowConsumer.of(tree, "queue", "train"), rows) == dict.fromkeys(range(rows), 1)
            assert "has no room" in events(tree, "journal_full")[0]["reason"]
            run_id = tree.run_id
    assert ShmSpace(run_id).names() == []


def test_producers_wait_where_files_have_no_room_and_go_on_when_rows_are_done(tmp_path):
    """Memory is over its budget, and what should make room has none: back-pressure, no error."""
    rows, width = 24, 64 << 10
    with tiny(tmp_path / "run" / "spill", "256k"):
        spec = QueueSpec(fields=FIELDS, groups=GROUPS, max_bytes=256 << 10)
        with running(tmp_path, spec) as tree:
            producer = RowProducer.of(tree, "queue", window=1)
            putting = threading.Thread(
                target=lambda: [producer.put({"tokens": [np.full(width, n, np.uint8)]}) for n in range(rows)]
            )
            putting.start()
            eventually(lambda: events(tree, "spill_failed"))
            assert putting.is_alive()
            queue = tree.ref("queue", RowQueue)
            assert queue.ask(RowQueue.progress, "train").result()["put"] < rows
            assert got(RowConsumer.of(tree, "queue", "train", max_rows=2), rows) == dict.fromkeys(
                range(rows), 1
            )
            putting.join(60.0)
            assert not putting.is_alive()
            assert "raise queue.max_size_gb" in events(tree, "spill_failed")[0]["reason"]


def test_a_small_memory_is_an_error_with_a_name_and_never_a_bus_error(tmp_path):
    """What does not fit now waits; what never fits fails; both leave the memory as it was."""
    with tiny(tmp_path / "shm", "8m") as folder:
        spec = QueueSpec(fields=FIELDS, groups=GROUPS, max_bytes=8 << 20)
        with running(tmp_path, spec, shm_root=str(folder)) as tree:
            producer = RowProducer.of(tree, "queue", patience_s=0.2)
            with pytest.raises(SegmentSpaceError):
                producer.put({"tokens": [np.zeros(16 << 20, np.uint8)]})
            with pytest.raises(SegmentSpaceError):
                producer.put({"tokens": [np.broadcast_to(np.uint8(0), 5 << 30)]})
            for number in range(3):
                producer.put({"tokens": [np.full(2 << 20, number, np.uint8)]})
            with pytest.raises(SegmentSpaceError):
                producer.put({"tokens": [np.zeros(4 << 20, np.uint8)]})
            consumer = RowConsumer.of(tree, "queue", "train", max_rows=1, prefetch=False)
            patient = RowProducer.of(tree, "queue", patience_s=60.0)
            putting = threading.Thread(
                target=lambda: patient.put({"tokens": [np.full(3 << 20, 3, np.uint8)]})
            )
            putting.start()
            producer.close()  # its arenas are kept for rows that it may still put
            assert got(consumer, 4) == dict.fromkeys(range(4), 1)
            putting.join(60.0)
            assert not putting.is_alive()


@pytest.mark.parametrize("nbytes", [(2 << 30) + 4096, (4 << 30) + 4096])
def test_a_row_larger_than_small_integers_say_is_read_where_it_lies(tmp_path, nbytes):
    """Its memory is sparse: a real file of so many bytes, of which only the ends exist."""
    root = tmp_path / "memory"
    root.mkdir()
    group = ConsumerGroup(name="train", needs=("tokens", "tail"))
    spec = QueueSpec(fields=group.needs, groups=(group,), max_bytes=8 << 30)
    with running(tmp_path, spec, shm_root=str(root)) as tree:
        consumer = RowConsumer.of(tree, "queue", "train")
        holder = RowProducer.of(tree, "queue")._site.holder
        space = ShmSpace(tree.run_id, root)
        name = space.name(holder.name, holder.incarnation, "large")
        with (root / name).open("wb") as file:
            file.write(b"\x01")
            file.seek(nbytes - 1)
            file.write(b"\x02\x03\x04")
        columns = {
            "tokens": Column(name, 0, "uint8", (), (nbytes,)),
            "tail": Column(name, nbytes, "uint8", (), (2,)),
        }
        put = tree.ref("queue", RowQueue).ask(RowQueue.put, holder, 1, columns, [], 0)
        assert put.result().outcome == "accepted"
        batch = consumer.get(60.0)
        row, tail = batch.views("tokens")[0], batch.views("tail")[0]
        assert (row.nbytes, int(row[0]), int(row[-1]), tail.tolist()) == (nbytes, 1, 2, [3, 4])
        consumer.ack(batch)
        consumer.flush()
        eventually(lambda: not space.names("rowq"))


def test_a_put_that_no_message_between_hosts_can_carry_is_refused_by_name(tmp_path):

    with running(tmp_path, QueueSpec(fields=FIELDS, groups=GROUPS)) as tree:
        way = Remote(Outside(tree), "dock")
        layout = Layout({"tokens": [np.broadcast_to(np.uint8(0), (8 << 30) + 1)]})
        with pytest.raises(ParcelTooLargeError, match="put fewer rows at once"):
            blocking(way.write(layout, 1.0))
