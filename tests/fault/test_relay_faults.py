"""The relay while its stores and its publisher are killed and stopped, as processes of one tree.

The hosts are folders of shared memory; test_relay_hosts.py has network namespaces.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from relay_hosts import eventually, relay_root, weights
from relay_stores import StorePlay

from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.faults import Action, Fault, plan
from relax_actor.roles.store import PolicyStore

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

PATIENCE_S = 1.0
NAMES = ("store_a", "store_b", "store_c")
BUCKET_BYTES = 9000
BUCKETS = 3


class Play(StorePlay):
    """A chain of three stores."""

    names = NAMES

    def tree(self, faults=(), patience_s=PATIENCE_S):
        return self.stores(faults, patience_s=patience_s)

    def deaths(self, name):
        return [event for event in self.events("child_exited") if event["child"] == name]

    def events_of(self, name, kind):
        return [event for event in self.events(kind) if event["actor"] == name]

    def publisher(self):
        return PolicyPublisher(self.space("store_a"), bucket_bytes=BUCKET_BYTES)

    def await_version(self, name, version):
        eventually(lambda: self.check(name) == version)


@pytest.fixture
def play(tmp_path):
    with relay_root() as root:
        yield Play(tmp_path, root)


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
        version, deadline = -1, time.monotonic() + 100
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
            assert subprocess.run(argv, env=env, check=False, timeout=60).returncode == -signal.SIGKILL
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
        eventually(lambda: play.events_of("store_c", "policy_relayed")[-1]["version"] == 5)
        assert play.events_of("store_c", "policy_relayed")[-1]["upstream"] == "store_a"
        lost = [each["reason"] for each in play.events_of("store_c", "relay_link_lost")]
        assert any("sent nothing for 1 s" in reason for reason in lost)
        stopped.resume()
        play.await_version("store_b", 5)
        eventually(lambda: play.events_of("store_c", "relay_linked")[-1]["upstream"] == "store_b")
        publish(publisher, 6)
        play.await_version("store_c", 6)


def test_a_store_that_stops_in_the_middle_of_a_version_is_skipped(play):
    faults = [Fault(actor="store_b", point="relay_chunk", nth=2, action=Action.STOP)]
    with play.tree(faults, patience_s=1.0) as tree, play.publisher() as publisher:
        publish(publisher, 0, tensors=100)
        play.await_version("store_c", 0)
        [relayed] = eventually(lambda: play.events_of("store_c", "policy_relayed"))
        assert relayed["upstream"] == "store_a"
        psutil.Process(tree.pid("store_b")).resume()


def test_a_chunk_altered_on_its_way_is_asked_for_once_more(play):
    faults = [Fault(actor="store_a", point="relay_chunk", nth=2, action=Action.LOSE)]
    with play.tree(faults, patience_s=20.0), play.publisher() as publisher:  # nobody but b asks a
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
