"""Deaths of actors with GPUs: told at once, restarted when the card is free; an NCCL gang that breaks."""

import os
import signal
import time

import pytest
from gpu_actors import Hog, NcclRank

from relax_actor import Backoff, ChildSpec, Supervisor, SupervisorSpec
from relax_actor.errors import ActorDied, GangAborted

TORCH = {"default": ("torch",)}
QUICK = Backoff(base_s=0.01, cap_s=0.05)


def spec_of(child):
    return SupervisorSpec(id="root", backoff=QUICK, children=(child,))


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
def test_a_dead_actor_is_told_at_once_and_restarted_when_its_card_is_free(tmp_path):
    """With more than half of the card, the next incarnation fits only if the memory is back."""
    hog = ChildSpec(
        id="hog",
        actor=Hog,
        args={"gpu_gib": 80, "pinned_gib": 2},
        devices=("cuda:0",),
        start_timeout_s=120.0,
    )
    with Supervisor(spec_of(hog), run_dir=tmp_path, zygotes=TORCH) as tree:
        ref = tree.ref("hog", Hog)
        burning = ref.ask(Hog.burn, 120.0)
        time.sleep(1.0)
        killed_at = time.monotonic()
        os.kill(tree.pid("hog"), signal.SIGKILL)
        assert isinstance(burning.exception(), ActorDied)
        assert time.monotonic() - killed_at < 1.0
        assert ref.within(120).ask(Hog.where).result()[1] == 2


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [1, 0])  # rank 0 has the store in which they met
def test_a_rank_killed_inside_an_nccl_collective_costs_one_process(tmp_path, monkeypatch, lost):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    ranks = ChildSpec(id="rank", actor=NcclRank, replicas=2, gang=True, start_timeout_s=120.0)
    with Supervisor(spec_of(ranks), run_dir=tmp_path, zygotes=TORCH) as tree:
        refs = [tree.ref(f"rank/{rank}", NcclRank).within(120) for rank in range(2)]
        sums = [ref.ask(NcclRank.sum_of_ranks) for ref in refs]
        assert [reply.result() for reply in sums] == [3.0, 3.0]
        survivor = 1 - lost
        before = refs[survivor].ask(NcclRank.where).result()
        replies = [ref.ask(NcclRank.sum_until_aborted) for ref in refs]
        time.sleep(1.0)
        os.kill(tree.pid(f"rank/{lost}"), signal.SIGKILL)
        killed_at = time.monotonic()
        assert isinstance(replies[survivor].exception(), GangAborted)
        assert time.monotonic() - killed_at < 5.0
        sums = [ref.ask(NcclRank.sum_of_ranks) for ref in refs]
        assert [reply.result() for reply in sums] == [3.0, 3.0]
        after = refs[survivor].ask(NcclRank.where).result()
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] == before[1] + 1
