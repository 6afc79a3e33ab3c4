"""A row queue over hosts that share no memory: whoever dies while bytes travel, each row is settled once."""

import time
from collections import Counter

import pytest
from loop_hosts import loop_hosts
from row_hosts import GROUP_ROWS, children, tree_over

from relax_actor import Backoff, Intensity, faults
from relax_actor.faults import Fault
from relax_actor.row_queue import RowQueue

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

GROUPS = 8
POINTS = [
    ("painter", "rows_written"),
    ("painter", "parcel_sent"),
    ("painter", "rows_sent"),
    ("dock", "parcel_written"),
    ("dock", "parcel_docked"),
    ("dock", "rows_given"),
    ("queue", "rows_adopted"),
    ("queue", "rows_committed"),
    ("looker", "rows_got"),
    ("looker", "rows_done"),
]


@pytest.mark.parametrize(("actor", "where"), POINTS)
def test_each_row_is_settled_once_wherever_one_dies_and_no_host_keeps_anything(tmp_path, actor, where):
    log, rows = tmp_path / "seen", GROUPS * GROUP_ROWS
    log.touch()
    env = faults.plan([Fault(actor=actor, point=where, nth=3)])
    specs = children(log, GROUPS, painter="b", looker="c", env=env)
    limits = {"backoff": Backoff(base_s=0.01, cap_s=0.05), "intensity": Intensity(restarts=50)}
    with loop_hosts(3) as hosts:
        with tree_over(hosts, tmp_path / "run", *specs, **limits) as tree:
            queue, deadline = tree.ref("queue", RowQueue).within(60.0), time.monotonic() + 120
            while (progress := queue.ask(RowQueue.progress, "train").result())["acked"] < rows:
                assert time.monotonic() < deadline, progress
                time.sleep(0.02)
        assert [path for path in hosts.memory.rglob("*") if not path.is_dir()] == []
    assert (progress["put"], progress["acked"], progress["dropped"]) == (rows, rows, 0)
    seen = Counter(map(int, log.read_text().split()))
    assert set(seen) == set(range(rows))
    again = sum(count - 1 for count in seen.values())
    assert again <= 6 if actor in {"looker", "queue"} else not again
