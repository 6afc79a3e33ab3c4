"""A replica's weights, over real segments: whole or torn, in turn, by whichever route is left."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from watching import eventually

from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.dcs.disk import DiskSource
from relax_actor.dcs.loans import LOAN_S, Lender, parts
from relax_actor.dcs.manifest import BucketEntry, Dtype, Manifest, PolicyCorruptError, TensorEntry
from relax_actor.dcs.peer import PeerSource
from relax_actor.dcs.probe import PROBED_BYTES, PROBED_TENSORS, ProbeError, install_probed, probe_names
from relax_actor.dcs.puller import NoRouteError
from relax_actor.dcs.receiver import PolicyMissingError
from relax_actor.dcs.replica import PATIENCE_S, RETRY_S, SETTLE_S, Replica
from relax_actor.dcs.replica_states import WeightsState
from relax_actor.dcs.routes import RouteBook
from relax_actor.dcs.source import SharedMemorySource, SourceUnavailableError
from relax_actor.dcs.turns import InstallTurns, may_wait
from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.errors import EngineNotReadyError
from relax_actor.engines.scripted import ScriptedEngine
from relax_actor.errors import ActorDied, Executed
from relax_actor.telemetry import EventLog, read_events
from relax_actor.trainers.checkpoint import CheckpointStore
from transport.clock import ManualClock
from transport.shm import ShmSpace

TENSORS = 5


@pytest.fixture
def space(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    return ShmSpace("0badcafe", folder)


@pytest.fixture
def publisher(space):
    with PolicyPublisher(space, bucket_bytes=256) as made:
        yield made


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def events(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "rollout/0", 1)
    log.seen = lambda kind: [event for event in read_events(path)[0] if event["kind"] == kind]
    return log


class Neighbours:
    """Peers in this process: a lender each; one that is None is dead."""

    def __init__(self, **lenders):
        self.lenders = lenders
        self.parts = 0

    def offers(self):
        offers = {name: lender.offer for name, lender in self.lenders.items() if lender is not None}
        return {name: version for name, version in offers.items() if version is not None}

    def lend(self, peer, version):
        return self._alive(peer).lend(version)

    def part(self, peer, loan_id, index):
        self.parts += 1
        return self._alive(peer).part(loan_id, index)

    def give_back(self, peer, loan_id):
        with contextlib.suppress(ActorDied):
            self._alive(peer).give_back(loan_id)

    def _alive(self, peer):
        if self.lenders[peer] is None:
            raise ActorDied(peer, 1, "SIGKILL", Executed.NO)
        return self.lenders[peer]


class Setup:
    """A replica, and all that it stands on."""

    def __init__(self, space, tmp_path, events, clock, *, replicas=1, max_staleness=1, peers=None, slots=4):
        self.engine = ScriptedEngine(seed=1, slots=slots, vocab=range(9), stop_token_id=9)
        self.lender = Lender(self.engine, clock=clock)
        receiver = PolicyReceiver(space)
        self.sources = [SharedMemorySource(receiver), DiskSource(tmp_path / "checkpoints")]
        if peers is not None:
            self.sources.append(PeerSource(peers))
        self.turns = InstallTurns(space, replicas)
        self.replica = Replica(
            self.engine,
            self.sources,
            announced=receiver.latest,
            lender=self.lender,
            turns=self.turns,
            max_staleness=max_staleness,
            events=events,
            clock=clock,
        )

    @property
    def values(self):
        """The first element of each weight."""
        names = [f"t{i}" for i in range(TENSORS)]
        return [float(tensor.reshape(-1)[0]) for _, tensor in self.engine.weights(names)]

    def refresh_until(self, is_reached):
        """Refresh as between decode steps: beside samples in flight a thread verifies first."""
        ends_s = time.monotonic() + 60
        while not is_reached():
            assert time.monotonic() < ends_s
            self.replica.refresh()

    def sample(self, count=1):
        params = SamplingParams(max_new_tokens=50)
        self.engine.submit(
            [Request(group_id=0, sample_index=i, prompt=(1,), params=params) for i in range(count)]
        )


@pytest.fixture
def setup(space, tmp_path, events, clock):
    return lambda **options: Setup(space, tmp_path, events, clock, **options)


def policy(version):
    return [(f"t{i}", np.full(32, version * 10 + i, np.float32)) for i in range(TENSORS)]


def published(publisher, version):
    return publisher.publish(version, version, policy(version))


def flip(space, version, bucket=1):
    with space.attach(f"rx-0badcafe-dcs.{version}-b{bucket}", writable=True) as segment:
        segment.buf[200] ^= 1


def save(tmp_path, version, *, name="model"):
    from safetensors.numpy import save_file

    def write(folder):
        (folder / name).mkdir()
        save_file(dict(policy(version)), folder / name / "model.safetensors", {"format": "pt"})

    return CheckpointStore(tmp_path / "checkpoints").save(
        version, write, {"policy_version": version, "run_id": "x"}
    )


def expected(version):
    return [version * 10 + i for i in range(TENSORS)]


# Following


def test_a_replica_waits_for_the_first_version_and_follows_the_newest(setup, publisher, events):
    made = setup()
    made.replica.refresh()
    assert (made.replica.state, made.replica.is_behind) == (WeightsState.EMPTY, False)

    for version in (0, 1, 4):
        published(publisher, version)
        assert made.replica.is_behind
        made.replica.refresh()
        assert made.values == expected(version)
        assert (made.replica.state, made.replica.can_sample) == (WeightsState.SERVING, True)

    installed = events.seen("policy_installed")
    assert [event["version"] for event in installed] == [0, 1, 4]
    assert {event["route"] for event in installed} == {"shared_memory"}
    assert all(event["nbytes"] > 0 and event["waited_s"] == 0 for event in installed)
    made.replica.refresh()
    assert len(events.seen("policy_installed")) == 3


def test_a_flipped_byte_is_refused_by_name_and_the_old_version_goes_on(setup, publisher, space, events):
    made = setup()
    published(publisher, 0)
    made.replica.refresh()
    made.sample()
    published(publisher, 1)
    flip(space, 1)

    made.refresh_until(lambda: events.seen("install_refused"))
    for _ in range(5):
        made.replica.refresh()

    assert (made.engine.version, made.values) == (0, expected(0))
    refused = events.seen("install_refused")
    assert len(refused) == 1  # not read again at every decode step
    assert "bucket 1 of policy version 1 is corrupt" in refused[0]["reason"]
    assert [event["route"] for event in events.seen("route_failed")] == ["shared_memory", "disk"]

    published(publisher, 2)
    made.refresh_until(lambda: made.engine.version == 2)
    assert made.values == expected(2)


def test_a_refused_version_is_tried_again_after_a_while(setup, publisher, space, clock):
    made = setup()
    published(publisher, 0)
    made.replica.refresh()
    published(publisher, 1)
    flip(space, 1)
    made.replica.refresh()
    flip(space, 1)
    made.replica.refresh()
    assert made.engine.version == 0
    clock.advance(RETRY_S)
    made.replica.refresh()
    assert made.engine.version == 1


@pytest.fixture
def long_rests(monkeypatch):
    monkeypatch.setattr("relax_actor.dcs.routes.FIRST_REST_S", 2 * RETRY_S)


@pytest.mark.usefixtures("long_rests")
def test_while_all_routes_rest_nothing_is_said(setup, publisher, space, clock, events):
    made = setup()
    del made.replica._puller._sources["disk"]
    made.replica._puller._book = RouteBook(["shared_memory"])
    published(publisher, 0)
    made.replica.refresh()
    published(publisher, 1)
    flip(space, 1)
    made.replica.refresh()
    clock.advance(RETRY_S)
    made.replica.refresh()
    assert len(events.seen("install_refused")) == 1


def test_the_queue_may_say_the_same_or_less_again(setup, publisher, clock):
    made = setup()
    published(publisher, 3)
    made.replica.refresh()
    for version in (4, 4, 2):
        made.replica.told(version)
    assert made.replica.is_behind
    clock.advance(SETTLE_S)
    made.replica.refresh()  # nobody has it
    assert made.engine.version == 3


def test_a_version_retired_since_it_was_announced_is_followed_by_a_newer_one(publisher, space):
    for version in range(5):
        published(publisher, version)
    with SharedMemorySource(PolicyReceiver(space)).open(1) as opened:
        assert opened.manifest.version == 4


def test_a_version_nobody_has_is_missing(publisher, space):
    published(publisher, 1)
    with pytest.raises(PolicyMissingError):
        SharedMemorySource(PolicyReceiver(space)).open(2)


# In turn


@pytest.mark.parametrize(
    ("installed", "newest", "in_flight", "max_staleness", "expected"),
    [
        (4, 5, 3, 1, True),
        (4, 6, 3, 1, False),  # its samples would be too old
        (4, 6, 3, 2, True),
        (4, 5, 3, 0, False),
        (4, 5, 0, 1, False),  # it stands still already
        (None, 5, 3, 1, False),
    ],
)
def test_a_replica_waits_only_while_it_loses_nothing(installed, newest, in_flight, max_staleness, expected):
    assert may_wait(installed, newest, in_flight=in_flight, max_staleness=max_staleness) is expected


@pytest.mark.parametrize(("replicas", "turns"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_at_most_half_of_the_replicas_have_a_turn(space, replicas, turns):
    made = [InstallTurns(space, replicas) for _ in range(replicas)]
    taken = [turn for each in made if (turn := each.take()) is not None]
    assert len(taken) == turns

    with taken[0]:
        pass
    assert made[-1].take() is not None


def test_without_a_turn_a_replica_decodes_on_and_says_how_long_it_waited(setup, publisher, events, clock):
    made = setup(replicas=2)
    published(publisher, 0)
    made.replica.refresh()
    made.sample()
    published(publisher, 1)

    with InstallTurns(made.turns._space, 2).take():
        made.replica.refresh()
        assert (made.replica.state, made.engine.version) == (WeightsState.WAITING, 0)
        assert made.replica.can_sample
        made.engine.step()
        clock.advance(3.0)
        made.replica.refresh()
        assert made.engine.version == 0
    made.refresh_until(lambda: made.engine.version == 1)

    assert (made.replica.state, made.engine.version) == (WeightsState.SERVING, 1)
    assert events.seen("policy_installed")[-1]["waited_s"] == pytest.approx(3.0, abs=0.5)


def test_without_a_turn_a_replica_installs_before_its_samples_are_too_old(setup, publisher):
    made = setup(replicas=2, max_staleness=1)
    published(publisher, 0)
    made.replica.refresh()
    made.sample()
    with InstallTurns(made.turns._space, 2).take():
        published(publisher, 1)
        made.replica.refresh()
        assert made.engine.version == 0
        published(publisher, 2)
        made.replica.refresh()
        assert made.engine.version == 2


class Held(SharedMemorySource):
    """Shared memory whose verification waits until it may go on."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.may_go_on = threading.Event()
        self.threads = []

    def _verified(self, version):
        self.threads.append(threading.current_thread().name)
        assert self.may_go_on.wait(60)
        return super()._verified(version)


@pytest.fixture
def held(setup, publisher, space):
    """A replica with a sample in flight, version 0 of its own and version 1 to verify, which does not end."""
    made = setup()
    made.source = Held(PolicyReceiver(space))
    made.replica._puller._sources["shared_memory"] = made.source
    made.source.may_go_on.set()
    published(publisher, 0)
    made.replica.refresh()
    made.source.may_go_on.clear()
    made.sample()
    published(publisher, 1)
    return made


def test_a_replica_decodes_on_while_a_version_is_verified(held, events):
    for _ in range(3):
        held.replica.refresh()
        assert (held.replica.state, held.engine.version) == (WeightsState.WAITING, 0)
        assert held.replica.can_sample
        held.engine.step()

    held.source.may_go_on.set()
    held.refresh_until(lambda: held.engine.version == 1)

    assert held.values == expected(1)
    assert held.source.threads == [threading.main_thread().name, "verify"]  # once each
    assert events.seen("policy_installed")[-1]["waited_s"] >= 0.0


def test_a_replica_with_nothing_to_decode_verifies_at_once(held):
    held.engine.abort([(0, 0)])
    held.source.may_go_on.set()
    held.replica.refresh()
    assert held.engine.version == 1
    assert "verify" not in held.source.threads


def test_of_a_version_overtaken_while_it_is_verified_no_lease_is_left(held, publisher, space):
    held.replica.refresh()
    published(publisher, 2)  # version 0 would be two behind: it cannot wait any more
    held.source.may_go_on.set()
    held.replica.refresh()
    assert (held.engine.version, held.values) == (2, expected(2))

    published(publisher, 3)
    held.refresh_until(lambda: held.engine.version == 3)
    eventually(lambda: all(_is_free(space, 2, bucket) for bucket in range(2)))


def _is_free(space, version, bucket):
    lock = space.try_lock(space.name("dcs", version, f"b{bucket}"))
    if lock is not None:
        lock.close()
    return lock is not None


def test_a_sweep_of_the_run_gives_no_turn(space, monkeypatch):
    turns = InstallTurns(space, 1)
    create = space.create
    monkeypatch.setattr(space, "create", lambda *args: _created_and_swept(space, create, args))
    assert turns.take() is None


def _created_and_swept(space, create, args):
    made = create(*args)
    space.sweep()
    return made


# Torn, and whole again


class Cut:
    """A source that breaks off: in the middle of its tensors, `times` times."""

    def __init__(self, source, times):
        self._source, self._times, self.route = source, times, source.route

    def latest(self):
        return self._source.latest()

    @contextlib.contextmanager
    def open(self, version):
        with self._source.open(version) as opened:
            self._opened, self.manifest = opened, opened.manifest
            yield self

    def tensors(self):
        for index, (name, tensor) in enumerate(self._opened.tensors()):
            if index == 2 and self._times:
                self._times -= 1
                raise SourceUnavailableError(self.route, "lost half way")
            yield name, tensor


def cut(made, times):
    """Let the replica's shared memory break off half way."""
    puller = made.replica._puller
    puller._sources = {
        route: Cut(source, times) if route == "shared_memory" else source
        for route, source in puller._sources.items()
    }


def test_a_torn_replica_is_made_whole_by_the_next_route_and_keeps_its_samples(
    setup, publisher, tmp_path, events
):
    made = setup()
    published(publisher, 0)
    made.replica.refresh()
    made.sample()
    made.engine.step()
    published(publisher, 1)
    save(tmp_path, 1)
    cut(made, 1)

    made.replica.refresh()

    assert (made.values, made.engine.in_flight) == (expected(1), 1)
    event = events.seen("policy_installed")[-1]
    assert (event["route"], event["failed_routes"]) == ("disk", ["shared_memory"])
    made.engine.step()
    (completion,) = made.engine.abort([(0, 0)])
    assert completion.versions.tolist() == [0, 1]


def test_a_torn_replica_tries_a_route_that_failed_again_before_it_gives_up(setup, publisher):
    made = setup()
    published(publisher, 0)
    made.replica.refresh()
    published(publisher, 1)
    cut(made, 1)
    made.replica.refresh()
    assert made.values == expected(1)


def test_a_torn_replica_may_go_back_to_what_it_had_and_no_further(setup, publisher, tmp_path, clock):
    made = setup()
    published(publisher, 3)
    made.replica.refresh()
    save(tmp_path, 3)
    published(publisher, 4)
    cut(made, 99)
    made.replica.refresh()
    assert (made.values, made.replica.state) == (expected(3), WeightsState.SERVING)

    save(tmp_path, 2)  # nothing but an older one is left
    clock.advance(60)
    with pytest.raises(NoRouteError):
        made.replica.refresh()
    assert (made.replica.state, made.replica.can_sample, made.engine.version) == (
        WeightsState.FAILED,
        False,
        None,
    )
    with pytest.raises(EngineNotReadyError):
        made.engine.step()


class Forgetful(ScriptedEngine):
    """An engine that does not copy one of the weights it says it has installed."""

    def _kept(self, name, value):
        return super()._kept(name, value if name != "t2" else torch.zeros_like(value))


def test_an_install_that_did_not_reach_the_model_is_found_and_never_sampled(publisher, space):
    engine = Forgetful(seed=1, slots=4, vocab=range(9), stop_token_id=9)
    errors = [error for version in range(8) if (error := probed(engine, publisher, space, version))]

    assert {error.name for error in errors} == {"t2"}  # other tensors are read back each time
    assert all(
        f"`t2` of policy version {error.version} was installed wrong" in str(error) for error in errors
    )


def probed(engine, publisher, space, version):
    """Publish and install a version; return what the probe found."""
    published(publisher, version)
    with PolicyReceiver(space).open() as snapshot:
        try:
            install_probed(engine, snapshot.manifest, snapshot.tensors())
        except ProbeError as error:
            found = error
        else:
            found = None
    assert engine.version == (None if found else version)
    return found


def test_a_probe_compares_what_was_published_in_the_engines_element_type():
    class Half(ScriptedEngine):
        def _kept(self, name, value):
            return super()._kept(name, value.to(torch.bfloat16))

    engine = Half(seed=1, slots=1, vocab=range(9), stop_token_id=9)
    weights = [("a", torch.randn(100)), ("b", torch.empty(0))]
    tensors = tuple(entry(name, 4 * len(value)) for name, value in weights)
    manifest = Manifest(version=0, step=0, tensors=tensors, buckets=())

    install_probed(engine, manifest, iter(weights))

    assert engine.version == 0


def entry(name, nbytes):
    return TensorEntry(name=name, dtype=Dtype.UINT8, shape=(nbytes,), bucket=0, offset=0, nbytes=nbytes)


def manifest_of(sizes, version=0):
    tensors = tuple(entry(f"t{i}", nbytes) for i, nbytes in enumerate(sizes))
    return Manifest(version=version, step=0, tensors=tensors, buckets=(BucketEntry(nbytes=1, xxh3=""),))


def test_probes_are_few_and_small_and_come_to_every_tensor():
    seen = [probe_names(manifest_of([100] * 30, version)) for version in range(200)]
    assert {len(names) for names in seen} == {PROBED_TENSORS}
    assert len(frozenset().union(*seen)) == 30

    large = [PROBED_BYTES // 2 + 1] * 5
    assert {len(probe_names(manifest_of(large, version))) for version in range(9)} == {1}
    assert probe_names(manifest_of([PROBED_BYTES + 2, PROBED_BYTES + 1, 0])) == {"t1"}
    assert probe_names(manifest_of([])) == frozenset()


# Lost shared memory


def lender_of(setup, publisher, version):
    other = setup()
    published(publisher, version)
    other.replica.refresh()
    return other


def test_with_shared_memory_gone_a_new_replica_borrows_from_a_peer(setup, publisher, space, events, clock):
    other = lender_of(setup, publisher, 5)
    space.sweep()
    made = setup(peers=Neighbours(a=None, b=other.lender))
    made.replica.refresh()
    assert made.replica.state is WeightsState.EMPTY

    made.replica.told(5)
    made.replica.refresh()
    assert made.replica.state is WeightsState.EMPTY  # it may still come by itself
    clock.advance(SETTLE_S)
    made.replica.refresh()

    assert made.values == expected(5)
    event = events.seen("policy_installed")[-1]
    assert (event["route"], event["failed_routes"]) == ("peer", ["shared_memory"])
    assert not other.lender.is_lending  # given back
    assert made.lender.offer == 5


def test_with_all_peers_gone_it_comes_from_disk(setup, space, tmp_path, clock, events):
    save(tmp_path, 4)
    made = setup(peers=Neighbours(a=None))
    made.replica.told(5)
    clock.advance(SETTLE_S)
    made.replica.refresh()

    assert (made.values, made.engine.version) == (expected(4), 4)
    assert made.replica.is_behind  # so it asks for no prompts
    assert events.seen("policy_installed")[-1]["route"] == "disk"


def test_with_nothing_left_it_fails_after_its_patience_and_says_why(setup, clock):
    made = setup(peers=Neighbours(a=None))
    made.replica.told(5)
    clock.advance(SETTLE_S)
    made.replica.refresh()
    made.replica.refresh()
    clock.advance(PATIENCE_S)

    with pytest.raises(NoRouteError) as caught:
        made.replica.refresh()

    text = str(caught.value)
    for says in ["shared_memory: policy version 5 is not", "peer: ", "disk: ", "no checkpoint in"]:
        assert says in text
    assert made.replica.state is WeightsState.FAILED


def test_what_is_visible_is_installed_although_the_word_that_announces_it_is_gone(
    setup, publisher, space, clock
):
    published(publisher, 5)
    space.unlink("rx-0badcafe-dcs-latest.0-word")
    made = setup()
    made.replica.told(4)  # the queue's word may be older
    clock.advance(SETTLE_S)
    made.replica.refresh()
    assert made.values == expected(5)


# Loans


def test_a_lender_puts_its_install_off_until_the_loan_is_over(setup, publisher, clock):
    made = lender_of(setup, publisher, 0)
    made.sample()
    loan = made.lender.lend(0)
    published(publisher, 1)
    made.replica.refresh()
    assert made.engine.version == 0
    assert made.lender.part(loan.loan_id, 0) is not None

    clock.advance(LOAN_S + 0.1)
    assert made.lender.part(loan.loan_id, 0) is None
    made.refresh_until(lambda: made.engine.version == 1)
    assert made.lender.lend(0) is None


def test_a_loan_is_void_once_the_lender_had_to_install(setup, publisher):
    made = lender_of(setup, publisher, 0)
    made.sample()
    loan = made.lender.lend(0)
    for version in (1, 2):
        published(publisher, version)
    made.replica.refresh()
    assert made.engine.version == 2
    assert made.lender.part(loan.loan_id, 0) is None


def test_a_replica_without_weights_lends_nothing(setup):
    made = setup()
    assert made.lender.offer is None
    assert made.lender.lend(0) is None
    assert made.lender.part(1, 0) is None


@pytest.fixture
def two_lenders(setup, publisher, monkeypatch):
    """Two replicas of version 0, lent tensor by tensor."""
    monkeypatch.setattr("relax_actor.dcs.peer.PART_BYTES", 1)
    monkeypatch.setattr("relax_actor.dcs.loans.parts", lambda manifest: parts(manifest, 1))
    return [lender_of(setup, publisher, 0).lender, lender_of_same(setup).lender]


def lender_of_same(setup):
    other = setup()
    other.replica.refresh()
    return other


@pytest.mark.parametrize("lost_after", range(TENSORS))
def test_when_a_lender_is_lost_another_goes_on_with_the_next_part(two_lenders, lost_after):
    peers = Neighbours(a=two_lenders[0], b=two_lenders[1])
    found = {}
    with PeerSource(peers).open(0) as opened:
        for name, tensor in opened.tensors():
            found[name] = float(tensor[0])
            if len(found) == lost_after:
                peers.lenders["a"] = None
    assert found == dict(zip([f"t{i}" for i in range(TENSORS)], expected(0), strict=True))


def test_when_a_loan_is_over_another_peer_goes_on_if_it_still_lends(two_lenders):
    first, second = two_lenders
    with PeerSource(Neighbours(a=first, b=second)).open(0) as opened:
        tensors = opened.tensors()
        names = [next(tensors)[0]]
        first.give_back(1)
        names += [name for name, _ in tensors]
    assert names == [f"t{i}" for i in range(TENSORS)]


def test_who_offered_a_version_and_has_it_no_more_is_passed_over(two_lenders, monkeypatch):
    peers = Neighbours(a=two_lenders[0], b=two_lenders[1])
    monkeypatch.setattr(two_lenders[0], "lend", lambda _: None)
    with PeerSource(peers).open(0) as opened:
        assert len(list(opened.tensors())) == TENSORS
    monkeypatch.setattr(two_lenders[1], "lend", lambda _: None)
    with pytest.raises(PolicyMissingError), PeerSource(peers).open(0):
        pass


def test_when_the_last_lender_is_lost_the_version_is_missing(two_lenders):
    peers = Neighbours(a=two_lenders[0])
    with PeerSource(peers).open(0) as opened:
        tensors = opened.tensors()
        next(tensors)
        peers.lenders["a"] = None
        with pytest.raises(PolicyMissingError, match="with any other replica"):
            list(tensors)


def test_a_part_altered_on_its_way_is_refused(two_lenders, monkeypatch):
    peers = Neighbours(a=two_lenders[0])
    lent = peers.part

    def altered(*args):
        part = lent(*args)
        part.data[5] ^= 1
        return part

    monkeypatch.setattr(peers, "part", altered)
    with PeerSource(peers).open(0) as opened, pytest.raises(PolicyCorruptError, match="bucket 0"):
        list(opened.tensors())


def test_a_peer_with_another_version_does_not_lend_it_as_this_one(setup, publisher):
    source = PeerSource(Neighbours(a=lender_of(setup, publisher, 3).lender))
    assert source.latest() == 3
    with pytest.raises(PolicyMissingError, match="the newest is 3"), source.open(4):
        pass


def test_without_peers_the_route_is_closed():
    source = PeerSource(Neighbours(a=None))
    assert source.latest() is None
    with pytest.raises(SourceUnavailableError, match="no other replica"), source.open(4):
        pass


def test_tensors_are_dealt_to_parts_of_bounded_size():
    assert parts(manifest_of([5, 5, 20, 1, 1]), 10) == [("t0", "t1"), ("t2",), ("t3", "t4")]
    assert parts(manifest_of([0, 0]), 10) == [("t0", "t1")]
    assert parts(manifest_of([]), 10) == []


# Disk


def test_the_newest_whole_checkpoint_is_opened_and_every_byte_is_checked(tmp_path):
    source = DiskSource(tmp_path / "checkpoints")
    assert source.latest() is None
    save(tmp_path, 2)
    path = save(tmp_path, 4)
    with source.open(4) as opened:
        assert {name: float(tensor[0]) for name, tensor in opened.tensors()} == {
            f"t{i}": 40.0 + i for i in range(TENSORS)
        }
        assert [e.nbytes for e in opened.manifest.tensors] == [128] * TENSORS
        assert (opened.manifest.version, opened.manifest.step) == (4, 4)
    with pytest.raises(PolicyMissingError, match="on disk; the newest is 4"):
        source.open(2)

    file = path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(PolicyCorruptError, match="bucket 0 of policy version 4"):
        source.open(4)
    file.unlink()
    with pytest.raises(PolicyCorruptError):
        source.open(4)
    (path / "manifest.json").unlink()
    assert source.latest() == 2


def test_a_file_that_goes_while_it_is_read_is_corruption(tmp_path):
    path = save(tmp_path, 4)
    with DiskSource(tmp_path / "checkpoints").open(4) as opened:
        (path / "model" / "model.safetensors").unlink()
        with pytest.raises(PolicyCorruptError):
            list(opened.tensors())


def test_a_checkpoint_without_a_version_is_passed_over(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, lambda folder: (folder / "x").touch(), {})
    assert DiskSource(tmp_path / "checkpoints").latest() is None
