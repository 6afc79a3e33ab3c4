"""A row queue under fire: whoever dies wherever, each row is settled once by each group; nothing is left."""

import time
from collections import Counter

import pytest
from row_actors import TRAINER_ROWS, Maker, Scorer, Trainer

from relax_actor import Backoff, ChildSpec, Intensity, RestartType, Supervisor, SupervisorSpec, faults
from relax_actor.faults import Fault
from relax_actor.row_queue import ConsumerGroup, QueueSpec, RowQueue, WholeGroups
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

ROWS = 90
SPEC = QueueSpec(
    fields=("tokens", "number", "reward"),
    groups=(
        ConsumerGroup(name="score", needs=("tokens",), max_attempts=9),
        ConsumerGroup(
            name="train", needs=("tokens", "number", "reward"), sampler=WholeGroups(), max_attempts=9
        ),
    ),
)
POINTS = [
    ("maker", "rows_written"),
    ("maker", "rows_sent"),
    ("queue", "rows_adopted"),
    ("queue", "rows_decided"),
    ("queue", "rows_committed"),
    ("queue", "rows_put"),
    ("queue", "fields_put"),
    ("queue", "rows_leased"),
    ("queue", "rows_acked"),
    ("scorer", "rows_got"),
    ("scorer", "rows_done"),
    ("scorer", "rows_written"),
    ("trainer", "rows_got"),
    ("trainer", "rows_done"),
]


def settle(tmp_path, plan, **options):
    """Run to the end; return the progress of both groups and how often each row was seen by the trainer."""
    env = faults.plan(plan)
    log = tmp_path / "seen"
    log.touch()
    spec = QueueSpec(fields=SPEC.fields, groups=SPEC.groups, **options)
    children = (
        ChildSpec(id="queue", actor=RowQueue, args={"spec": spec}, env=env),
        ChildSpec(id="maker", actor=Maker, args={"total": ROWS}, restart=RestartType.TRANSIENT, env=env),
        ChildSpec(id="scorer", actor=Scorer, restart=RestartType.TRANSIENT, env=env),
        ChildSpec(
            id="trainer", actor=Trainer, args={"log": str(log)}, restart=RestartType.TRANSIENT, env=env
        ),
    )
    root = SupervisorSpec(
        id="root",
        backoff=Backoff(base_s=0.01, cap_s=0.05),
        intensity=Intensity(restarts=50),
        children=children,
    )
    with Supervisor(root, run_dir=tmp_path / "run", zygotes={"default": ("numpy",)}) as tree:
        queue, deadline = tree.ref("queue", RowQueue).within(60.0), time.monotonic() + 120
        while (progress := [queue.ask(RowQueue.progress, name).result() for name in ("score", "train")])[1][
            "acked"
        ] < ROWS:
            assert time.monotonic() < deadline, progress
            time.sleep(0.02)
        progress = [queue.ask(RowQueue.progress, name).result() for name in ("score", "train")]
        restarts = {child.name: child.restarts for child in tree.status().children if child.restarts}
        run_id = tree.run_id
    assert restarts == Counter(fault.actor for fault in plan)
    assert ShmSpace(run_id).names() == []
    return progress, Counter(map(int, log.read_text().split()))


@pytest.mark.parametrize(("actor", "where"), POINTS)
def test_each_row_is_settled_once_wherever_one_dies(tmp_path, actor, where):
    """Twice: the first time that it comes there, and when its second incarnation has gone on for a while."""
    deaths = [
        Fault(actor=actor, point=where, nth=nth, incarnation=each) for each, nth in enumerate((1, 4), start=1)
    ]
    progress, seen = settle(tmp_path, deaths)
    for group in progress:
        assert (group["put"], group["acked"], group["dropped"]) == (ROWS, ROWS, 0)
    assert set(seen) == set(range(ROWS))
    again = sum(count - 1 for count in seen.values())
    unsettled = 2 * TRAINER_ROWS  # what is in hand, and what has an acknowledgement on its way
    assert again <= (unsettled * len(deaths) if actor in {"trainer", "queue"} else 0)


def test_rows_that_memory_has_no_room_for_are_in_files_meanwhile(tmp_path):
    progress, seen = settle(tmp_path, [], max_bytes=64)
    assert progress[1]["acked"] == ROWS
    assert set(seen.values()) == {1}


def test_a_producer_waits_where_the_queue_is_full(tmp_path):
    progress, _ = settle(tmp_path, [], max_rows=12)
    assert progress[1]["acked"] == ROWS
