"""Replicas, lenders and publishers that are killed while a policy version goes from one to the other.

Processes are forked, so that a schedule of deaths takes milliseconds. What a replica says it has installed is
checked by the replica itself, tensor by tensor, before it says so.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from relax_actor.dcs import PolicyCorruptError, PolicyPublisher, PolicyReceiver
from relax_actor.dcs.disk import DiskSource
from relax_actor.dcs.loans import Lender, parts
from relax_actor.dcs.peer import PeerSource
from relax_actor.dcs.puller import ROUTE_ERRORS, NoRouteError
from relax_actor.dcs.replica import SETTLE_S, Replica
from relax_actor.dcs.replica_states import WeightsState
from relax_actor.dcs.source import SharedMemorySource
from relax_actor.dcs.turns import InstallTurns
from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.scripted import ScriptedEngine
from relax_actor.errors import ActorDied, Executed
from relax_actor.faults import VARIABLE, Action, Fault, arm, plan
from relax_actor.telemetry import EventLog, read_events
from relax_actor.trainers.checkpoint import CheckpointStore
from transport.clock import ManualClock
from transport.shm import SegmentMissingError, ShmSpace

pytestmark = pytest.mark.fault

TENSORS = 6
ELEMENTS = 512
BUCKET_BYTES = 2 * ELEMENTS * 4 + 512  # two tensors and the head
BUCKETS = 3


def weights(version):
    return [(f"t{i}", np.full(ELEMENTS, version * 10 + i, np.float32)) for i in range(TENSORS)]


class Forked:
    """A child process that runs `work(connection)`; whatever it does, no clean-up of ours runs in it."""

    def __init__(self, work, *, faults=()):
        self.connection, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            code = 1
            try:
                torch.set_num_threads(1)
                os.environ[VARIABLE] = plan(list(faults))[VARIABLE]
                arm("child", 1)
                work(theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._code = None

    def wait(self):
        """Return the exit code, negative for a signal."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self):
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()


class Replaying:
    """A replica in a process of its own, and the versions it said it had."""

    def __init__(self, child):
        self.child, self.versions, self.failure = child, [], ""

    def strike(self, told, after_s):
        """Kill it while it looks, at a moment that is no point."""
        with contextlib.suppress(OSError):
            self.child.connection.send(told)
        time.sleep(after_s)
        self.child.kill()

    def look(self, told):
        """Let it look for what is newer; return whether it lives."""
        try:
            self.child.connection.send(told)
            answer = self.child.connection.recv()
        except (EOFError, OSError):
            return False
        if isinstance(answer, str):
            self.failure = answer
            return False
        if answer is not None:
            self.versions.append(answer)
        return True


def looked(engine, replica):
    """Refresh; return the version, checked, or None, or why there is none to be had."""
    ends_s = time.monotonic() + 60
    try:
        replica.refresh()
        while is_verifying(replica):
            assert time.monotonic() < ends_s
            replica.refresh()
    except NoRouteError as error:
        return str(error)
    if engine.version is None:
        return None
    check_whole(engine)
    return int(engine.version)


def is_verifying(replica):
    """Whether a thread of its verifies, or has just verified, what it is to install."""
    newest = replica._newest()
    is_refused = replica._refused_version == newest
    return replica.state is WeightsState.WAITING and replica._is_newer(newest) and not is_refused


class PipePeers:
    """One lender in another process."""

    def __init__(self, connection):
        self._connection = connection

    def offers(self):
        with contextlib.suppress(ActorDied):
            offer = self._ask("offer")
            return {} if offer is None else {"lender": offer}
        return {}

    def lend(self, _, version):
        return self._ask("lend", version)

    def part(self, _, loan_id, index):
        return self._ask("part", loan_id, index)

    def give_back(self, _, loan_id):
        with contextlib.suppress(ActorDied):
            self._ask("give_back", loan_id)

    def _ask(self, *call):
        try:
            self._connection.send(call)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ActorDied("lender", 1, "SIGKILL", Executed.MAYBE) from error


class Stage:
    """Shared memory, checkpoints and events of one run, and who lives on them."""

    def __init__(self, folder):
        self.space = ShmSpace(f"fault{os.getpid()}x{random.getrandbits(32):08x}")
        self.folder = folder
        self.store = CheckpointStore(folder / "checkpoints", keep=1)
        self.children = []

    def close(self):
        for child in self.children:
            child.kill()
        self.space.sweep()

    def start(self, work, *, faults=()):
        child = Forked(work, faults=faults)
        self.children.append(child)
        return child

    def publish(self, version, *, faults=()):
        """Publish, from a process of its own where that is to die; return whether it survived."""

        def work(_=None):
            with PolicyPublisher(self.space, bucket_bytes=BUCKET_BYTES) as publisher:
                publisher.publish(version, version, weights(version))

        if faults:
            return self.start(work, faults=faults).wait() == 0
        work()
        return True

    def save(self, version):
        def write(folder):
            (folder / "model").mkdir()
            save_file(dict(weights(version)), folder / "model" / "model.safetensors")

        self.store.save(version, write, {"policy_version": version})

    def flip(self, version, bucket, position):
        name = self.space.name("dcs", version, f"b{bucket}")
        with self.space.attach(name, writable=True) as segment:
            segment.buf[position % segment.nbytes] ^= 1

    def replica(self, peers=None):
        """Make an engine and what keeps it at the newest version."""
        clock, receiver = ManualClock(), PolicyReceiver(self.space)
        engine = ScriptedEngine(seed=1, slots=4, vocab=range(9), stop_token_id=9)
        sources = [SharedMemorySource(receiver), DiskSource(self.folder / "checkpoints")]
        if peers is not None:
            sources.append(PeerSource(peers))
        lender = Lender(engine)
        replica = Replica(
            engine,
            sources,
            announced=receiver.latest,
            lender=lender,
            turns=InstallTurns(self.space, 2),
            max_staleness=1,
            events=EventLog(self.folder / "events.jsonl", "child", 1),
            clock=clock,
        )
        return engine, replica, lender, clock

    def follow(self, *, peers=None, faults=(), is_busy=False):
        """Start a replica that looks once for each version it is told of, and says which one it has.

        It says why, and ends, where it finds no route.

        Args:
            peers: a connection to a lender.
            faults: what happens to it.
            is_busy: it has a sample in flight, so a thread verifies while it decodes.
        """

        def work(connection):
            engine, replica, _, clock = self.replica(PipePeers(peers) if peers else None)
            params = SamplingParams(max_new_tokens=1000)
            request = Request(group_id=0, sample_index=0, prompt=(1,), params=params)
            with contextlib.suppress(EOFError):
                while True:
                    replica.told(connection.recv())
                    clock.advance(SETTLE_S)
                    connection.send(looked(engine, replica))
                    if is_busy and not engine.in_flight and engine.version is not None:
                        engine.submit([request])

        return Replaying(self.start(work, faults=faults))

    def lend(self, version, *, faults=()):
        """Start a lender that has a version; return it once it has."""

        def work(connection):
            engine, replica, lender, _ = self.replica()
            replica.refresh()
            check_whole(engine)
            connection.send(int(engine.version))
            while True:
                method, *arguments = connection.recv()
                found = lender.offer if method == "offer" else getattr(lender, method)(*arguments)
                connection.send(found)

        child = self.start(work, faults=faults)
        assert child.connection.recv() == version
        return child

    def routes(self):
        events, _ = read_events(self.folder / "events.jsonl")
        return [str(event["route"]) for event in events if event["kind"] == "policy_installed"]


def check_whole(engine):
    found = {name: set(tensor.tolist()) for name, tensor in engine.weights([f"t{i}" for i in range(TENSORS)])}
    assert found == {f"t{i}": {float(engine.version * 10 + i)} for i in range(TENSORS)}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Parts of one tensor, so that a loan has several."""
    monkeypatch.setattr("relax_actor.dcs.peer.PART_BYTES", 1)
    monkeypatch.setattr("relax_actor.dcs.loans.parts", lambda manifest: parts(manifest, 1))
    made = Stage(tmp_path)
    yield made
    made.close()


STEPS = {"shared_memory": BUCKETS, "peer": TENSORS, "disk": 1}


@pytest.mark.parametrize(
    ("route", "step", "nth"),
    [
        *[(route, "install_bucket", nth) for route, count in STEPS.items() for nth in range(1, count + 1)],
        *[(route, "install_copied", 1) for route in STEPS],
    ],
)
def test_a_replica_killed_at_any_step_of_any_route_is_followed_by_one_that_succeeds(stage, route, step, nth):
    stage.publish(3)
    lender = stage.lend(3) if route == "peer" else None
    stage.save(3)
    if route != "shared_memory":
        stage.space.sweep()

    peers = lender and lender.connection
    victim = stage.follow(peers=peers, faults=[Fault(actor="child", point=step, nth=nth)])
    assert not victim.look(3)
    assert victim.child.wait() == -signal.SIGKILL
    assert stage.routes() == (["shared_memory"] if lender else [])  # the lender's own

    successor = stage.follow(peers=peers)
    assert successor.look(3)
    assert successor.versions == [3]
    assert stage.routes()[-1] == route


@pytest.mark.parametrize("nth", range(1, TENSORS + 1))
def test_a_lender_killed_at_any_part_is_followed_by_the_next_route(stage, nth):
    stage.publish(3)
    lender = stage.lend(3, faults=[Fault(actor="child", point="policy_lent", nth=nth)])
    stage.save(3)
    stage.space.sweep()

    replica = stage.follow(peers=lender.connection)

    assert replica.look(3)
    assert lender.wait() == -signal.SIGKILL
    assert replica.versions == [3]
    assert stage.routes()[-1] == "disk"


def test_a_lender_that_was_killed_and_nothing_else_left_is_an_error_that_names_each_route(stage):
    stage.publish(3)
    lender = stage.lend(3, faults=[Fault(actor="child", point="policy_lent", nth=2)])
    stage.space.sweep()

    replica = stage.follow(peers=lender.connection)
    while replica.look(3):  # it has its patience, a second a look
        pass

    assert replica.versions == []
    for route in ("shared_memory", "peer", "disk"):
        assert f"\n  {route}: " in replica.failure


@pytest.mark.parametrize("bucket", range(BUCKETS))
@pytest.mark.parametrize("position", [3, 700, -1])
def test_a_flipped_byte_is_refused_by_name_and_the_next_route_brings_the_version(stage, bucket, position):
    stage.publish(3)
    lender = stage.lend(3)
    stage.flip(3, bucket, position)

    with pytest.raises(PolicyCorruptError, match=f"bucket {bucket} of policy version 3"):
        SharedMemorySource(PolicyReceiver(stage.space)).open(3)
    replica = stage.follow(peers=lender.connection)

    assert replica.look(3)
    assert replica.versions == [3]
    assert stage.routes()[-1] == "peer"


@pytest.mark.parametrize("nth", range(1, BUCKETS + 1))
def test_a_replica_killed_while_it_verifies_and_decodes_leaves_no_lease(stage, nth):
    stage.publish(3)
    fault = Fault(actor="child", point="verify_bucket", nth=BUCKETS + nth)
    victim = stage.follow(faults=[fault], is_busy=True)
    assert victim.look(3)
    stage.publish(4)
    assert not victim.look(4)
    assert victim.child.wait() == -signal.SIGKILL

    for bucket in range(BUCKETS):
        assert stage.space.try_lock(stage.space.name("dcs", 4, f"b{bucket}")) is not None
    successor = stage.follow()
    assert successor.look(4)
    assert successor.versions == [4]


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_flipped_byte_found_while_it_decodes_leaves_the_old_version_whole(stage, bucket):
    stage.publish(3)
    replica = stage.follow(is_busy=True)
    assert replica.look(3)
    stage.publish(4)
    stage.flip(4, bucket, 700)
    assert replica.look(4)
    stage.publish(5)
    assert replica.look(5)
    assert replica.versions == [3, 3, 5]
    assert stage.routes() == ["shared_memory"] * 2


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP])
def test_who_dies_with_a_turn_gives_it_back_and_who_stops_keeps_only_one(stage, action):
    def work(connection):
        with InstallTurns(stage.space, 4).take():
            connection.send("taken")
            os.kill(os.getpid(), signal.SIGKILL if action is Action.KILL else signal.SIGSTOP)

    holder = stage.start(work)
    assert holder.connection.recv() == "taken"
    if action is Action.KILL:
        holder.wait()
    turns = [InstallTurns(stage.space, 4) for _ in range(3)]
    taken = [turn for each in turns if (turn := each.take()) is not None]
    assert len(taken) == (2 if action is Action.KILL else 1)


class Schedule:
    """A random run: publishers, lenders and replicas, most of which are killed somewhere.

    What a replica says it has is whole and of that version (it has checked), never older than what it
    said before, and in the end, once a publisher lives, the newest.
    """

    def __init__(self, stage, seed):
        self.stage, self.random = stage, random.Random(seed)
        self.version = -1  # the newest that was begun
        self.lender = self.replica = None

    def play(self, moves):
        choices = [self.publish, self.publish, self.lend, self.save, self.damage, self.look, self.look]
        for _ in range(moves):
            self.random.choice(choices)()
        self.settle()

    def publish(self):
        self.version += 1
        self.stage.publish(self.version, faults=self.fault("publish_bucket", "publish_manifest"))

    def lend(self):
        newest = self.whole_in_memory()
        if newest is not None:
            self.lender = self.stage.lend(newest, faults=self.fault("policy_lent"))

    def save(self):
        newest = self.whole_in_memory()
        if newest is not None:
            self.stage.save(newest)

    def damage(self):
        newest = PolicyReceiver(self.stage.space).latest()
        if self.random.random() < 0.2:
            self.stage.space.sweep()
        elif newest is not None:
            with contextlib.suppress(SegmentMissingError):  # swept before
                self.stage.flip(newest, self.random.randrange(BUCKETS), self.random.randrange(4096))

    def look(self):
        if self.replica is None:
            peers = self.lender and self.lender.connection
            self.replica = self.stage.follow(
                peers=peers,
                faults=self.fault("install_bucket", "install_copied", "verify_bucket"),
                is_busy=self.random.random() < 0.5,
            )
        if self.random.random() < 0.1:
            self.replica.strike(max(0, self.version), self.random.random() * 0.005)
        if not self.replica.look(max(0, self.version)):
            assert self.replica.failure or self.replica.child.wait() == -signal.SIGKILL
            self.lender = self.replica = None  # half an answer may be left between the two
        elif self.replica.versions:
            assert self.replica.versions == sorted(self.replica.versions)
            assert self.replica.versions[-1] <= self.version

    def settle(self):
        self.version += 1
        assert self.stage.publish(self.version)
        last = self.stage.follow()
        assert last.look(self.version)
        assert last.versions == [self.version]

    def fault(self, *points):
        """Plan a death at one of the points in two of three cases."""
        if self.random.random() < 1 / 3:
            return []
        return [Fault(actor="child", point=self.random.choice(points), nth=self.random.randint(1, 4))]

    def whole_in_memory(self):
        receiver = PolicyReceiver(self.stage.space)
        newest = receiver.latest()
        if newest is None:
            return None
        try:
            with SharedMemorySource(receiver).open(newest) as opened:
                return opened.manifest.version
        except ROUTE_ERRORS:  # damaged or swept: nothing to lend or to save
            return None


@pytest.mark.parametrize("seed", range(100))
def test_random_deaths_never_leave_a_torn_version_installed_nor_an_older_one(stage, seed):
    Schedule(stage, seed).play(8)
