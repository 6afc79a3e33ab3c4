"""The relay while its stores and its publisher are killed and stopped, as processes of one tree.

The hosts are folders of shared memory; test_relay_hosts.py has network namespaces.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from relay_hosts import eventually, weights

from relax_actor import Backoff, ChildSpec, Intensity, Supervisor, SupervisorSpec
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.faults import Action, Fault, plan
from relax_actor.roles.store import PolicyStore
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

QUICK = Backoff(base_s=0.01, cap_s=0.02)
PATIENCE_S = 1.0
NAMES = ("store_a", "store_b", "store_c")
BUCKET_BYTES = 9000
BUCKETS = 3


class Play:
    """A tree of three stores; the test is the publisher."""

    def __init__(self, tmp_path, root):
        self.tmp_path, self.root, self.run_id = tmp_path, root, secrets.token_hex(4)
        self.seen = dict.fromkeys(NAMES, -1)

    def space(self, name):
        return ShmSpace(self.run_id, self.root / name)

    def spec(self, faults, patience_s):
        children = tuple(
            ChildSpec(
                id=name,
                actor=PolicyStore,
                args={"chain": NAMES, "patience_s": patience_s, "shm_root": str(self.root / name)},
                env=plan(faults),
            )
            for name in NAMES
        )
        intensity = Intensity(restarts=1000, within_s=60.0)
        return SupervisorSpec(id="root", backoff=QUICK, intensity=intensity, children=children)

    @contextmanager
    def tree(self, faults=(), patience_s=PATIENCE_S):
        for name in NAMES:
            (self.root / name).mkdir()
        spec = self.spec(list(faults), patience_s)
        with Supervisor(spec, run_dir=self.tmp_path / "run", run_id=self.run_id) as tree:
            yield tree

    def events(self, kind):
        return [
            event for event in read_events(self.tmp_path / "run/events.jsonl")[0] if event["kind"] == kind
        ]

    def deaths(self, name):
        return [event for event in self.events("child_exited") if event["child"] == name]

    def publisher(self):
        return PolicyPublisher(self.space("store_a"), bucket_bytes=BUCKET_BYTES)

    def check(self, name):
        """Nothing torn is visible, and no version is older than one seen before."""
        receiver = PolicyReceiver(self.space(name))
        if receiver.latest() is None:
            return -1
        with receiver.open() as snapshot:
            snapshot.verify()
            for index, (_, array) in enumerate(snapshot.arrays()):
                assert (array == snapshot.version * 10 + index).all()
        assert snapshot.version >= self.seen[name]
        self.seen[name] = snapshot.version
        return snapshot.version

    def await_version(self, name, version):
        eventually(lambda: self.check(name) == version)


@pytest.fixture
def play(tmp_path):
    root = Path("/dev/shm") / f"relay-{secrets.token_hex(4)}"  # noqa: S108 - shared memory
    root.mkdir()
    yield Play(tmp_path, root)
    shutil.rmtree(root)


def publish(publisher, version, **shape):
    publisher.publish(version, version, weights(version, **shape))


@pytest.mark.parametrize(
    ("victim", "step"),
    [
        ("store_b", "store_bucket"),
        ("store_b", "store_manifest"),
        ("store_b", "store_latest"),
        ("store_c", "store_bucket"),
        ("store_a", "relay_chunk"),
        ("store_b", "relay_chunk"),
        ("store_a", "relay_offer"),
    ],
)
def test_a_store_killed_at_every_step_of_several_versions_shows_nothing_torn_and_nothing_older(
    play, victim, step
):
    """Each incarnation dies one step later than the one before, until one gets through."""
    lives = 6
    faults = [Fault(actor=victim, point=step, incarnation=life, nth=life) for life in range(1, lives)]
    with play.tree(faults), play.publisher() as publisher:
        version, deadline = -1, time.monotonic() + 40
        while len(play.deaths(victim)) < lives - 1:
            assert time.monotonic() < deadline
            version += 1
            publish(publisher, version)
            for name in NAMES:
                play.await_version(name, version)
    for name in NAMES:
        left = {each.rpartition("-")[2] for each in play.space(name).names("dcs")}
        assert "manifest.staging" not in left


PUBLISHER = f"""
import sys
sys.path.append(sys.argv[3])
from relay_hosts import weights
from relax_actor.dcs import PolicyPublisher
from relax_actor.faults import arm
from transport.shm import ShmSpace

arm("trainer", 1)
with PolicyPublisher(ShmSpace(sys.argv[1], sys.argv[2]), bucket_bytes={BUCKET_BYTES}) as publisher:
    latest = publisher.latest()
    for version in range(0 if latest is None else latest + 1, 100):
        publisher.publish(version, version, weights(version))
"""


@pytest.mark.parametrize("step", ["publish_bucket", "publish_manifest", "publish_latest"])
def test_of_a_publisher_killed_at_any_step_only_complete_versions_are_relayed(play, step):
    support = str(Path(__file__).parents[1] / "support")
    with play.tree():
        space = play.space("store_a")
        for nth in range(1, 8):
            argv = [sys.executable, "-P", "-c", PUBLISHER, space.run_id, str(space.root), support]
            env = os.environ | plan([Fault(actor="trainer", point=step, nth=nth)])
            assert subprocess.run(argv, env=env, check=False, timeout=30).returncode == -signal.SIGKILL
            if (latest := PolicyReceiver(space).latest()) is not None:
                for name in NAMES:
                    play.await_version(name, latest)
        assert play.seen["store_c"] >= 1


def test_a_stopped_store_costs_the_publisher_nothing_and_the_one_below_skips_it(play):
    with play.tree(patience_s=1.0) as tree, play.publisher() as publisher:
        publish(publisher, 0)
        play.await_version("store_c", 0)
        stopped = psutil.Process(tree.pid("store_b"))
        stopped.suspend()
        for version in range(1, 6):
            publish(publisher, version, tensors=20)
        play.await_version("store_c", 5)
        assert play.check("store_b") == 0
        last = play.events("policy_relayed")[-1]
        assert (last["actor"], last["upstream"]) == ("store_c", "store_a")
        [lost] = [each for each in play.events("relay_link_lost") if each["actor"] == "store_c"][:1]
        assert "sent nothing for 1 s" in lost["reason"]
        stopped.resume()
        play.await_version("store_b", 5)
        eventually(lambda: play.events("relay_linked")[-1]["upstream"] == "store_b")
        publish(publisher, 6)
        play.await_version("store_c", 6)


def test_a_store_that_stops_in_the_middle_of_a_version_is_skipped(play):
    faults = [Fault(actor="store_b", point="relay_chunk", nth=2, action=Action.STOP)]
    with play.tree(faults, patience_s=1.0) as tree, play.publisher() as publisher:
        publish(publisher, 0, tensors=100)
        play.await_version("store_c", 0)
        [relayed] = [each for each in play.events("policy_relayed") if each["actor"] == "store_c"]
        assert relayed["upstream"] == "store_a"
        psutil.Process(tree.pid("store_b")).resume()


def test_a_chunk_altered_on_its_way_is_asked_for_once_more(play):
    faults = [Fault(actor="store_a", point="relay_chunk", nth=2, action=Action.LOSE)]
    with play.tree(faults), play.publisher() as publisher:
        publish(publisher, 0)
        play.await_version("store_c", 0)
        [damaged] = play.events("relay_damaged")
        assert (damaged["actor"], damaged["version"], damaged["bucket"]) == ("store_b", 0, 1)


def test_an_older_link_is_refused_by_name(play):
    from relax_actor.errors import RemoteError
    from relax_actor.ids import Holder

    with play.tree() as tree:
        store = tree.ref("store_a", PolicyStore)
        store.ask(PolicyStore.link, Holder("store_x", 2), 5).result()
        for holder, epoch in ((Holder("store_x", 2), 4), (Holder("store_x", 1), 9)):
            with pytest.raises(RemoteError, match=r"store_x is at epoch 5 of store_x#2"):
                store.ask(PolicyStore.link, holder, epoch).result()
        store.ask(PolicyStore.link, Holder("store_x", 3), 1).result()


def test_a_store_of_a_chain_has_no_use_for_torch(play):
    with play.tree() as tree, play.publisher() as publisher:
        publish(publisher, 0)
        play.await_version("store_c", 0)
        for name in NAMES:
            assert not [m for m in psutil.Process(tree.pid(name)).memory_maps() if "libtorch" in m.path]
