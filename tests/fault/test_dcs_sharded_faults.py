"""Trainers of several ranks, each a process, one of which is killed while they publish together."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
from multiprocessing.connection import wait

import pytest
from sharded_models import decoder, full_model, trainer_shards

from relax_actor.dcs import PolicyReceiver
from relax_actor.dcs.layout import plan_buckets
from relax_actor.dcs.reshard import plan_reshard
from relax_actor.dcs.sharded import ShardedPublisher
from relax_actor.dcs.topology import ReplicaLayout, TrainerLayout
from relax_actor.faults import VARIABLE, Action, Fault, arm, plan
from transport.shm import SegmentMissingError, ShmSpace

pytestmark = pytest.mark.fault

LAYOUT = TrainerLayout(tp=2, pp=2)
SPECS = list(decoder(stages=2))
BUCKET_BYTES = 1024
PLAN = plan_reshard(SPECS, LAYOUT, ReplicaLayout())
BUCKETS = len(list(plan_buckets([each for spec in SPECS for each in spec.tensors], BUCKET_BYTES)))
MEET_S = 60.0


@pytest.fixture
def space():
    made = ShmSpace(f"fault{os.getpid()}x{random.getrandbits(32):08x}")
    yield made
    made.sweep()


class Gang:
    """Four ranks that publish versions one after the other, and end when one of them is lost."""

    def __init__(self, space, versions, faults=()):
        self._space, self._versions, self._faults = space, versions, list(faults)
        self.meeting = multiprocessing.Barrier(LAYOUT.world_size, timeout=MEET_S)
        self.pids = [self._fork(rank) for rank in range(LAYOUT.world_size)]

    def end(self):
        """Wait for the first rank that ends badly, break the meeting, return how each rank ended."""
        codes, running = {}, {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids)}
        while running:  # not `waitpid(-1)`: this process may have other children
            for pidfd in wait(running):
                rank = running.pop(pidfd)
                os.close(pidfd)
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
                if codes[rank]:
                    self.meeting.abort()
        return [codes[rank] for rank in range(len(self.pids))]

    def _fork(self, rank):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ[VARIABLE] = plan(self._faults)[VARIABLE]
                arm(f"trainer/{rank}", 1)
                code = self._publish(rank)
            finally:
                os._exit(code)
        return pid

    def _publish(self, rank):
        with ShardedPublisher(
            self._space, PLAN, rank, self.meeting.wait, bucket_bytes=BUCKET_BYTES
        ) as publisher:
            for version in self._versions:
                shards = trainer_shards(SPECS, full_model(SPECS, seed=version), LAYOUT)
                mine = {parameter: raw for (holder, parameter), raw in shards.items() if holder == rank}
                try:
                    publisher.publish(version, version, mine)
                except (threading.BrokenBarrierError, SegmentMissingError):
                    return 3
        return 0


def check_whole(space, version):
    with PolicyReceiver(space).open() as snapshot:
        snapshot.verify()
        found = {name: array.tobytes() for name, array in snapshot.arrays()}
        assert snapshot.version == version
    assert found == {name: array.tobytes() for name, array in full_model(SPECS, seed=version).items()}


@pytest.mark.parametrize("rank", range(LAYOUT.world_size))
@pytest.mark.parametrize("nth", range(1, BUCKETS + 1))
def test_a_rank_killed_at_any_bucket_leaves_no_visible_version_and_the_next_gang_publishes(space, rank, nth):
    """It dies in the third version, which is written into memory of the first."""
    fault = Fault(actor=f"trainer/{rank}", point="publish_bucket", nth=2 * BUCKETS + nth)
    codes = Gang(space, [0, 1, 2], [fault]).end()
    assert codes == [-signal.SIGKILL if each == rank else 3 for each in range(LAYOUT.world_size)]

    check_whole(space, 1)
    assert Gang(space, [3]).end() == [0] * LAYOUT.world_size
    check_whole(space, 3)
    assert {int(name.partition("-dcs.")[2].partition("-")[0]) for name in space.names("dcs")} == {1, 3}


@pytest.mark.parametrize(("step", "newest"), [("publish_manifest", 0), ("publish_latest", 1)])
def test_rank_0_killed_at_the_manifest_leaves_all_of_a_version_or_nothing(space, step, newest):
    codes = Gang(space, [0, 1], [Fault(actor="trainer/0", point=step, nth=2)]).end()
    assert codes[0] == -signal.SIGKILL
    check_whole(space, 0)  # the last that was announced

    assert Gang(space, []).end() == [0] * LAYOUT.world_size
    check_whole(space, newest)


def test_a_rank_that_stood_still_while_its_gang_was_replaced_does_no_harm(space):
    fault = Fault(actor="trainer/2", point="publish_bucket", nth=BUCKETS + 1, action=Action.STOP)
    stopped = Gang(space, [0, 1], [fault])
    os.waitpid(stopped.pids[2], os.WUNTRACED)
    stopped.meeting.abort()
    for rank in (0, 1, 3):
        assert os.waitstatus_to_exitcode(os.waitpid(stopped.pids[rank], 0)[1]) == 3

    assert Gang(space, [2, 3]).end() == [0] * LAYOUT.world_size
    with contextlib.ExitStack() as kept:
        kept.callback(os.kill, stopped.pids[2], signal.SIGKILL)
        os.kill(stopped.pids[2], signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(stopped.pids[2], 0)[1]) == 3
        kept.pop_all()
    check_whole(space, 3)
