"""Groups of stores while their members are killed and stopped in the middle of a broadcast, as processes."""

import itertools
import os
import signal
import time
from contextlib import contextmanager
from types import MappingProxyType

import psutil
import pytest
from relay_hosts import eventually, relay_root, weights
from relay_stores import StorePlay

from relax_actor.dcs import PolicyPublisher
from relax_actor.faults import Action, Fault
from relax_actor.ids import Holder
from relax_actor.roles.store import PolicyStore
from relax_actor.telemetry import Event, read_events

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

NAMES = ("store_a", "store_b", "store_c", "store_d")
MEMBERS = NAMES[1:]
BUCKETS = 15
"""Of each version: a piece each."""

GROUP_S = 60.0
"""How long a group may take to be formed: one that was of no use is followed by a rest."""

PATIENCE_S = 60.0
"""Of a chain in which nobody is to wait for it: longer than a version may take here."""


class Play(StorePlay):
    """Stores that form a group."""

    names = NAMES
    zygote = "torch"
    zygotes = MappingProxyType({"default": (), "torch": ("torch.distributed",)})

    @contextmanager
    def tree(self, faults=(), **args):
        with (
            self.stores(faults, relay="group", **args) as tree,
            PolicyPublisher(self.space(NAMES[0]), bucket_bytes=1 << 20) as self.publisher,
        ):
            yield tree

    def publish(self, version):
        self.publisher.publish(version, version, weights(version, tensors=30, elements=100_000))

    def group(self) -> Event:
        """Return the lead's last word of a group: that it was formed, or lost."""
        kinds = {"relay_group_formed", "relay_group_lost"}
        events, _ = read_events(self.tmp_path / "run/events.jsonl")
        said = [event for event in events if event["kind"] in kinds and event["actor"] == NAMES[0]]
        return said[-1] if said else {"kind": "", "epoch": 0}

    def epoch_of(self, *members):
        """Return the epoch of the group that there is, if it is of these; else 0."""
        last = self.group()
        return last["epoch"] if last.get("members") == list(members) else 0

    def await_group(self, *members, after=0):
        """Wait until there is a group of these, later than another; return its epoch."""
        return eventually(lambda: (epoch := self.epoch_of(*members)) > after and epoch, GROUP_S)

    def by_group(self, *members, begin=0, after=0):
        """Publish until a version came to all members by broadcast; return it.

        On a busy machine a group may break by itself: a second is all it waits.
        """
        deadline = time.monotonic() + 2 * GROUP_S
        for version in itertools.count(begin):
            assert time.monotonic() < deadline, "no version came by broadcast"
            self.await_group(*members, after=after)
            self.publish(version)
            self.await_version(version, *members)
            ways = eventually(lambda v=version: len(found := self.ways(v)) == len(members) and found)
            if set(ways.values()) == {"group"}:
                return version
        raise AssertionError

    def await_version(self, version, *names):
        for name in names:
            eventually(lambda name=name: self.check(name) == version)

    def ways(self, version):
        """By which way a version came, by store."""
        return {e["actor"]: e["relay"] for e in self.events("policy_relayed") if e["version"] == version}


@pytest.fixture
def play(tmp_path):
    with relay_root() as root:
        yield Play(tmp_path, root)


def is_lost(tree, play, victim):
    if any(event["child"] == victim for event in play.events("child_exited")):
        return True
    try:
        return psutil.Process(tree.pid(victim)).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("victim", MEMBERS)
@pytest.mark.parametrize("action", [Action.KILL, Action.STOP])
def test_a_member_lost_in_the_middle_of_a_broadcast_costs_the_others_no_patience(play, victim, action):
    """Whichever it is: the broadcast is a tree, so one of them stands between the lead and another."""
    fault = Fault(actor=victim, point="group_piece", nth=BUCKETS + 5, action=action)
    others = [name for name in MEMBERS if name != victim]
    with play.tree([fault], patience_s=PATIENCE_S) as tree:

        def lost_or_epoch():
            return is_lost(tree, play, victim) or play.epoch_of(*MEMBERS)

        version, epoch = -1, 0
        while (found := eventually(lost_or_epoch, GROUP_S)) is not True:
            version, epoch = version + 1, found
            play.publish(version)
            play.await_version(version, *others)
        if action is Action.STOP:
            version = play.by_group(*others, begin=version + 1, after=epoch)
            psutil.Process(tree.pid(victim)).resume()
        play.await_version(version, victim)
        play.by_group(*MEMBERS, begin=version + 1, after=epoch)


def test_a_lead_killed_in_the_middle_of_a_broadcast_is_followed_by_its_next_incarnation(play):
    with play.tree([Fault(actor=NAMES[0], point="group_sent", nth=BUCKETS + 5)]):
        version = play.by_group(*MEMBERS)
        while not play.events("child_exited"):
            version += 1
            play.publish(version)
            play.await_version(version, *MEMBERS)
        eventually(lambda: play.epoch_of(*MEMBERS) and play.group()["inc"] == 2, GROUP_S)
        play.by_group(*MEMBERS, begin=version + 1)


def test_a_lead_that_is_stopped_holds_up_only_what_is_new(play):
    with play.tree() as tree:
        version = play.by_group(*MEMBERS)
        epoch = play.await_group(*MEMBERS)
        lead = psutil.Process(tree.pid(NAMES[0]))
        lead.suspend()
        eventually(lambda: {e["actor"] for e in play.events("relay_group_lost")} >= set(MEMBERS))
        play.publish(version + 1)
        lead.resume()
        play.await_version(version + 1, *MEMBERS)
        play.by_group(*MEMBERS, begin=version + 2, after=epoch)


def test_a_piece_altered_on_its_way_comes_once_more_along_the_chain(play):
    with play.tree([Fault(actor=NAMES[0], point="group_sent", nth=BUCKETS + 5, action=Action.LOSE)]):
        version = play.by_group(*MEMBERS)
        while not play.events("relay_damaged"):
            version += 1
            play.publish(version)
            play.await_version(version, *MEMBERS)
        damaged = play.events("relay_damaged")
        assert sorted(event["actor"] for event in damaged) == list(MEMBERS)
        assert len({(event["version"], event["bucket"]) for event in damaged}) == 1
        play.by_group(*MEMBERS, begin=version + 1)


def test_members_killed_again_and_again_show_nothing_torn_and_nothing_older(play):
    lives = 5
    faults = [
        Fault(actor=victim, point="group_piece", incarnation=life, nth=3 * life + offset)
        for life in range(1, lives)
        for offset, victim in enumerate(MEMBERS)
    ]
    with play.tree(faults) as tree:
        for version in range(12):
            if version % 3 == 0:
                eventually(lambda: play.events("relay_group_formed"), GROUP_S)
            play.publish(version)
            play.await_version(version, *MEMBERS)
            if version == 6:
                os.kill(tree.pid(NAMES[0]), signal.SIGKILL)
    assert play.events("relay_group_lost")
    for name in NAMES:
        left = {each.rpartition("-")[2] for each in play.space(name).names("dcs")}
        assert "manifest.staging" not in left


def test_only_the_lead_gives_seats_and_a_stranger_gets_none(play):
    with play.tree() as tree:
        play.by_group(*MEMBERS)
        stranger = Holder("store_x", 1)
        for name in NAMES[:2]:
            assert tree.ref(name, PolicyStore).ask(PolicyStore.seat, stranger, 0).result() is None
        member = tree.ref(NAMES[1], PolicyStore)
        eventually(lambda: member.ask(PolicyStore.status).result().group_epoch == play.await_group(*MEMBERS))
