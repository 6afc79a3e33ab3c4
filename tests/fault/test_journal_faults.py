"""The writer of a journal may die anywhere: what it had said is there, and nothing else."""

import random
import subprocess
import sys
import time

import pytest

from relax_actor.transfer_queue.events import Published
from relax_actor.transfer_queue.journal import Journal, read

pytestmark = pytest.mark.fault

WRITER = """
import sys
from pathlib import Path
from relax_actor.transfer_queue.journal import Journal, read
from relax_actor.transfer_queue.records import Published

path = Path(sys.argv[1])
version = max((event.version for event in read(path)), default=0)
with Journal(path) as journal:
    print("begun", flush=True)
    while True:
        size = 1 + version % 300
        journal.append([Published(version=version + n) for n in range(1, size + 1)])
        journal.commit()
        version += size
        print(version, flush=True)
"""


def versions(path):
    return [event.version for event in read(path)]


def test_a_torn_tail_is_cut_at_every_byte(tmp_path):
    """Wherever the last write ends, the records before it are read and the next one follows them."""
    path = tmp_path / "ledger.journal"
    ends = []
    with Journal(path) as journal:
        ends.append(journal.nbytes)
        for version in (1, 2, 3):
            journal.append([Published(version=version)] * 4)
            journal.commit()
            ends.append(journal.nbytes)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        kept = max([n for n, end in enumerate(ends) if end <= cut], default=0)
        assert versions(path) == [v for v in range(1, kept + 1) for _ in range(4)], cut
        with Journal(path) as journal:
            journal.append([Published(version=9)])
            journal.commit()
        assert versions(path) == [*(v for v in range(1, kept + 1) for _ in range(4)), 9], cut


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_loses_nothing_it_has_told(tmp_path, seed):
    """Five kills a file, each at a random moment: no gap, no half decision, at most one more than told."""
    path = tmp_path / "ledger.journal"
    rng = random.Random(seed)
    for _ in range(5):
        told = _write_and_kill(path, after_lines=rng.randrange(1, 400), and_s=rng.uniform(0, 2e-3))
        found = versions(path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) in (told, told + 1 + told % 300)


def _write_and_kill(path, *, after_lines, and_s):
    """Return the last version that is told of: the file's when it began, or the writer's since."""
    told = max(versions(path), default=0)
    command = [sys.executable, "-P", "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(after_lines)]
        moment = time.perf_counter() + and_s
        while time.perf_counter() < moment:
            pass
        writer.kill()
        lines += writer.stdout.read().splitlines()
    return max([told, *(int(line) for line in lines if line.strip().isdigit())])
