"""Ranks that hold shards publish whole tensors; here the ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sharded_models import decoder, full_model, trainer_shards

from relax_actor.dcs import PolicyReceiver
from relax_actor.dcs.latest import PublisherActiveError
from relax_actor.dcs.publisher import PolicyPublisher
from relax_actor.dcs.reshard import plan_reshard
from relax_actor.dcs.sharded import ShardedPublisher
from relax_actor.dcs.shelf import PolicyBudgetError
from relax_actor.dcs.topology import ReplicaLayout, TrainerLayout
from transport.shm import SegmentMissingError, ShmSpace

LAYOUT = TrainerLayout(tp=2, pp=2)


@pytest.fixture
def space(tmp_path):
    return ShmSpace("0badcafe", tmp_path)


class Gang:
    """The ranks of a trainer, and their meeting."""

    def __init__(self, space, layout, **options):
        self.layout = layout
        self.specs = list(decoder(stages=layout.pp, experts=4 if layout.ep > 1 else 0))
        self.meeting = threading.Barrier(layout.world_size)
        plan = plan_reshard(self.specs, layout, ReplicaLayout())
        self.ranks = [
            ShardedPublisher(space, plan, rank, self.meet, bucket_bytes=1024, **options)
            for rank in range(layout.world_size)
        ]

    def meet(self):
        self.meeting.wait(60)

    def publish(self, version):
        """Return the manifest, and the whole model that was published."""
        weights = full_model(self.specs, seed=version)
        shards = trainer_shards(self.specs, weights, self.layout)
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            replies = [
                threads.submit(self._publish, rank, version, shards) for rank in range(len(self.ranks))
            ]
        manifests = [reply.result() for reply in replies]
        assert manifests[1:] == [None] * (len(self.ranks) - 1)
        return manifests[0], weights

    def _publish(self, rank, version, shards):
        mine = {parameter: raw for (holder, parameter), raw in shards.items() if holder == rank}
        try:
            return self.ranks[rank].publish(version, version, mine)
        except Exception:
            self.meeting.abort()
            raise

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def gang(space):
    made = []

    def started(layout=LAYOUT, **options):
        made.append(Gang(space, layout, **options))
        return made[-1]

    yield started
    for each in made:
        each.close()


def installed(space):
    with PolicyReceiver(space).open() as snapshot:
        snapshot.verify()
        return snapshot.version, {name: np.array(array) for name, array in snapshot.arrays()}


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, TrainerLayout(), TrainerLayout(tp=2, dp=2), TrainerLayout(tp=2, pp=2, dp=2, ep=2, etp=1)],
    ids=str,
)
def test_what_ranks_publish_is_the_whole_model_bit_for_bit(space, gang, layout):
    ranks = gang(layout)
    for version in range(4):  # from the third on in memory that is used again
        manifest, weights = ranks.publish(version)
        found, arrays = installed(space)
        assert (found, manifest.version, manifest.step) == (version, version, version)
        assert len(manifest.buckets) > 1
        assert {name: array.tobytes() for name, array in arrays.items()} == {
            name: array.tobytes() for name, array in weights.items()
        }
    assert ranks.ranks[0].latest() == 3


def test_ranks_write_the_same_bytes_as_one_publisher_with_the_whole_model(tmp_path, space, gang):
    manifest, weights = gang().publish(0)
    (tmp_path / "one").mkdir()
    with PolicyPublisher(ShmSpace("0badcafe", tmp_path / "one"), bucket_bytes=1024) as one:
        assert one.publish(0, 0, weights.items()) == manifest


def test_memory_that_nobody_reads_is_used_again_and_stays_mapped(space, gang):
    ranks = gang()
    for version in range(5):
        ranks.publish(version)
    assert {int(name.split(".")[1].split("-")[0]) for name in space.names("dcs")} == {3, 4}
    assert not [name for name in space.names() if "sums" in name]
    buckets = len(ranks.ranks[1]._buckets)
    assert [len(rank._mapped) for rank in ranks.ranks] == [2 * buckets] * 4


def test_a_bucket_that_has_a_reader_is_not_written(space, gang):
    ranks = gang()
    _, first = ranks.publish(0)
    with PolicyReceiver(space).open(0) as held:
        for version in (1, 2, 3):
            ranks.publish(version)
        held.verify()
        assert {name: array.tobytes() for name, array in held.arrays()} == {
            name: array.tobytes() for name, array in first.items()
        }


def test_a_rank_that_misses_a_shard_ends_the_gang_and_nothing_is_left(space, gang):
    ranks = gang()
    ranks.publish(0)
    before = space.names("dcs")
    shards = trainer_shards(ranks.specs, full_model(ranks.specs), LAYOUT)
    del shards[3, "mcore.lm_head"]
    with ThreadPoolExecutor(4) as threads:
        replies = [threads.submit(ranks._publish, rank, 1, shards) for rank in range(4)]
    errors = [reply.exception() for reply in replies]
    assert repr(errors[3]) == "KeyError('mcore.lm_head')"
    assert type(errors[0]) is threading.BrokenBarrierError
    late = {threading.BrokenBarrierError, SegmentMissingError}  # the second: rank 0 has given up already
    assert {type(error) for error in errors[1:3]} <= late
    assert (ranks.ranks[0].latest(), space.names("dcs")) == (0, before)


@pytest.mark.parametrize("label", ["b1", "sums"])
def test_a_rank_that_comes_after_rank_0_gave_up_finds_nothing(space, gang, label):
    ranks = gang()
    ranks.publish(0)
    with ranks.ranks[0]._begun(1):
        space.unlink(space.name("dcs", 1, label))
        with pytest.raises(SegmentMissingError, match=label):
            ranks.ranks[1]._open(1)


def test_a_version_that_does_not_fit_leaves_nothing(space, gang):
    ranks = gang(budget_bytes=2000)
    shards = trainer_shards(ranks.specs, full_model(ranks.specs), LAYOUT)
    with pytest.raises(PolicyBudgetError):
        ranks._publish(0, 0, shards)
    assert space.names("dcs") == []


def test_a_run_has_one_publisher_sharded_or_not(space, gang):
    gang()
    with pytest.raises(PublisherActiveError):
        PolicyPublisher(space)


def test_only_rank_0_knows_the_newest_version(gang):
    ranks = gang()
    ranks.publish(0)
    assert [rank.latest() for rank in ranks.ranks] == [0, None, None, None]


@pytest.mark.parametrize(("rank", "tp"), [(4, 1), (-1, 1), (0, 2)])
def test_a_rank_that_is_none_and_a_replica_with_several_ranks_are_refused(space, rank, tp):
    plan = plan_reshard(decoder(stages=2), LAYOUT, ReplicaLayout(tp=tp))
    with pytest.raises(ValueError, match=f"rank {rank} of 4 cannot publish for {tp} replica ranks"):
        ShardedPublisher(space, plan, rank, lambda: None)


def test_a_closed_gang_is_followed_by_another(space, gang):
    first = gang()
    first.publish(0)
    with first.ranks[0]:
        pass
    second = gang()
    assert second.ranks[0].latest() == 0
    second.publish(1)
    assert installed(space)[0] == 1
