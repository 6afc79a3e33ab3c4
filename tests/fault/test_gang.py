"""A gang: one rank dies inside a collective, the others abort, keep their memory and meet again."""

import os
import signal
import socket
from urllib.parse import urlsplit

import psutil
import pytest
from supervised_actors import Rank, TorchlessRank
from watching import QUICK, events_of, eventually

from relax_actor import ChildSpec, Intensity, Supervisor, SupervisorSpec
from relax_actor.errors import ActorDied, GangAborted

RANKS = 8


def gang(**options):
    rank = ChildSpec(
        **{
            "id": "rank",
            "actor": Rank,
            "replicas": RANKS,
            "gang": True,
            "zygote": "torch",
            "shutdown_s": 2.0,
            "abort_grace_s": 60.0,  # a rank that is slow is no rank that is stuck
            **options,
        }
    )
    return SupervisorSpec(id="root", backoff=QUICK, intensity=Intensity(restarts=9), children=(rank,))


@pytest.fixture
def tree(tmp_path):
    zygotes = {"default": (), "torch": ("torch",)}
    with Supervisor(gang(), run_dir=tmp_path, zygotes=zygotes) as tree:
        yield tree


def refs_of(tree):
    return [tree.ref(f"rank/{rank}", Rank).within(60) for rank in range(RANKS)]


def sums(refs):
    return [reply.result() for reply in [ref.ask(Rank.sum_of_ranks) for ref in refs]]


def places(refs):
    return [reply.result() for reply in [ref.ask(Rank.where) for ref in refs]]


def await_groups(tree, groups):
    eventually(lambda: len(events_of(tree, "gang_formed")) >= groups, 60.0, poll_s=0.02)


TOTAL = RANKS * (RANKS + 1) // 2


@pytest.mark.fault
def test_a_rank_killed_inside_an_all_reduce_costs_one_process(tree):
    refs = refs_of(tree)
    assert sums(refs) == [TOTAL] * RANKS
    before = places(refs)

    replies = [ref.ask(Rank.sum_for_ever) for ref in refs]
    for ref in refs:
        eventually(lambda ref=ref: ref.control.status().result()["method"] == "sum_for_ever")
    os.kill(tree.pid(f"rank/{RANKS - 1}"), signal.SIGKILL)
    errors = [reply.exception() for reply in replies]

    assert [type(error).__name__ for error in errors[:-1]] == ["GangAborted"] * (RANKS - 1)
    assert all(isinstance(error, GangAborted) for error in errors[:-1])
    assert isinstance(errors[-1], ActorDied)

    assert sums(refs) == [TOTAL] * RANKS  # waits for the next group
    after = places(refs)
    assert [pid for pid, _, _ in after[:-1]] == [pid for pid, _, _ in before[:-1]]
    assert [memory for _, _, memory in after] == [100] * (RANKS - 1) + [200]
    assert {epoch for _, epoch, _ in after} == {2}
    assert [event["epoch"] for event in events_of(tree, "gang_formed")] == [1, 2]
    (aborted,) = events_of(tree, "gang_aborted")
    assert aborted["child"] == f"rank/{RANKS - 1}"
    assert len(aborted["survivors"]) == RANKS - 1


def is_refused(rendezvous):
    """Whether nobody listens there any more."""
    where = urlsplit(rendezvous)
    try:
        socket.create_connection((where.hostname, where.port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.fault
@pytest.mark.parametrize("lost", [0, RANKS - 1])
def test_where_ranks_met_is_closed_to_those_who_come_too_late(tree, lost):
    """Each epoch has a store of its own, on loopback where the gang has one host; also if rank 0 lives on."""
    refs = refs_of(tree)
    assert sums(refs) == [TOTAL] * RANKS
    (before,) = {ref.ask(Rank.rendezvous).result() for ref in refs}
    assert urlsplit(before).hostname == "127.0.0.1"
    assert not is_refused(before)
    os.kill(tree.pid(f"rank/{lost}"), signal.SIGKILL)
    await_groups(tree, 2)
    assert sums(refs) == [TOTAL] * RANKS
    (after,) = {ref.ask(Rank.rendezvous).result() for ref in refs}
    assert after != before
    assert not is_refused(after)
    eventually(lambda: is_refused(before))  # the store's own thread closes it


@pytest.mark.fault
def test_ranks_without_torch_meet_where_rank_0_says(tmp_path):
    child = ChildSpec(id="rank", actor=TorchlessRank, replicas=3, gang=True)
    spec = SupervisorSpec(id="root", backoff=QUICK, children=(child,))
    with Supervisor(spec, run_dir=tmp_path) as tree:
        refs = [tree.ref(f"rank/{rank}", TorchlessRank).within(60) for rank in range(3)]
        assert {ref.ask(TorchlessRank.rendezvous).result() for ref in refs} == {"127.0.0.1 1"}
        os.kill(tree.pid("rank/0"), signal.SIGKILL)
        await_groups(tree, 2)
        assert {ref.ask(TorchlessRank.rendezvous).result() for ref in refs} == {"127.0.0.1 2"}


@pytest.mark.fault
def test_a_survivor_that_does_not_leave_the_collective_is_killed_and_replaced(tmp_path):
    zygotes = {"default": (), "torch": ("torch",)}
    with Supervisor(gang(abort_grace_s=5.0), run_dir=tmp_path, zygotes=zygotes) as tree:
        refs = refs_of(tree)
        assert sums(refs) == [TOTAL] * RANKS
        before = places(refs)
        stuck = psutil.Process(tree.pid("rank/0"))
        stuck.suspend()
        os.kill(tree.pid("rank/1"), signal.SIGKILL)
        await_groups(tree, 2)
        assert sums(refs[2:] + refs[:2]) == [TOTAL] * RANKS
        after = places(refs)
        pairs = zip(before, after, strict=True)
        assert [old[0] == new[0] for old, new in pairs] == [False, False] + [True] * (RANKS - 2)
        assert len(events_of(tree, "child_restarting")) == 1  # the other's end was part of the same failure


@pytest.mark.fault
def test_ranks_lost_again_and_again_never_meet_under_an_old_epoch(tree):
    refs = refs_of(tree)
    for round_ in range(3):
        assert sums(refs) == [TOTAL] * RANKS
        os.kill(tree.pid(f"rank/{round_ % RANKS}"), signal.SIGKILL)
        await_groups(tree, round_ + 2)
    assert sums(refs) == [TOTAL] * RANKS
    assert [event["epoch"] for event in events_of(tree, "gang_formed")] == [1, 2, 3, 4]
