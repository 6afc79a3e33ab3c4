"""The row queue's two ends from everywhere: actors, asynchronous code, the program itself, other hosts."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from loop_hosts import loop_hosts
from row_hosts import GROUP_ROWS, SPEC, Both, children, image, tokens, tree_over
from watching import eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.errors import ConfigError, RemoteError, StartFailed
from relax_actor.roles.dock import RowDock
from relax_actor.row_queue import (
    ConsumerGroup,
    NoWayError,
    QueueSpec,
    RowConsumer,
    RowProducer,
    RowQueue,
    TokenBudget,
)
from transport.shm import ShmSpace

pytestmark = pytest.mark.timeout(120)

PLAIN = QueueSpec(
    fields=("tokens", "reward"),
    groups=(
        ConsumerGroup(name="score", needs=("tokens",)),
        ConsumerGroup(name="train", needs=("tokens", "reward")),
    ),
)


def running(tmp_path, *more, spec=PLAIN, **options):
    queue = ChildSpec(id="queue", actor=RowQueue, args={"spec": spec})
    root = SupervisorSpec(id="root", children=(queue, *more))
    return Supervisor(root, run_dir=tmp_path / "run", zygotes={"default": ("numpy",)}, **options)


def count_bytes(space, value):
    """Return how often a byte is in the memory of a run's rows, of which some has several names."""
    files = {(space.root / name).stat().st_ino: space.root / name for name in space.names("rowq")}
    return sum(int((np.fromfile(file, np.uint8) == value).sum()) for file in files.values())


def test_the_program_itself_puts_and_gets(tmp_path):
    with running(tmp_path) as tree:
        producer = RowProducer.of(tree, "queue")
        consumers = [RowConsumer.of(tree, "queue", "score", max_rows=2, prefetch=False) for _ in range(2)]
        assert producer.put({"tokens": [tokens(number) for number in range(4)]}) == range(4)
        first, second = (consumer.get(30.0) for consumer in consumers)
        assert (first.rows, second.rows) == ([0, 1], [2, 3])
        assert [view.tolist() for view in second.views("tokens")] == [tokens(2).tolist(), tokens(3).tolist()]
        assert not first.views("tokens")[0].flags.writeable
        consumers[0].close()
        assert consumers[1].get(30.0).rows == [0, 1], "what is given back is dealt again"
        assert producer.rows_put() == 4
        run_id = tree.run_id
        del first, second
    assert ShmSpace(run_id).names() == []


def test_asynchronous_code_awaits_both_ends_and_its_mailbox_stays_open(tmp_path):
    with running(tmp_path, ChildSpec(id="both", actor=Both)) as tree:
        both = tree.ref("both", Both).within(30.0)
        passed = both.ask(Both.pass_on, 9)
        assert both.ask(Both.ping).result() == "here"
        assert passed.result() == list(range(10))
        queue = tree.ref("queue", RowQueue)
        assert queue.ask(RowQueue.progress, "train").result()["ready"] == 10


def test_a_program_with_a_loop_awaits_both_ends(tmp_path):
    async def work():
        async with running(tmp_path) as tree:
            producer, consumer = RowProducer.of(tree, "queue"), RowConsumer.of(tree, "queue", "score")
            assert await consumer.aget(0.05) is None
            await producer.aput({"tokens": [tokens(1)]})
            batch = await consumer.aget()
            assert batch.packed("tokens").tolist() == tokens(1).tolist()

    asyncio.run(work())


def test_a_get_lasts_no_longer_than_it_may(tmp_path, monkeypatch):
    """Also where its request was sent ahead, by a consumer with all the time in the world."""
    monkeypatch.setattr("relax_actor.row_queue.consumer.WAIT_S", 600.0)
    with running(tmp_path) as tree:
        consumer = RowConsumer.of(tree, "queue", "score")
        RowProducer.of(tree, "queue").put({"tokens": [tokens(1)]})
        assert consumer.get().rows == [0]
        assert consumer.get(0.2) is None


def test_the_media_of_a_group_are_stored_once_and_seen_by_all_its_rows(tmp_path):
    with running(tmp_path, spec=SPEC) as tree:
        producer = RowProducer.of(tree, "queue")
        fields = {"number": np.arange(2), "tokens": [tokens(0), tokens(1)]}
        producer.put(fields, [7, 7], GROUP_ROWS, {"image": {7: image(7)}})
        rest = {"number": np.array([2]), "tokens": [tokens(2)]}
        producer.put(rest, [7], GROUP_ROWS)
        space = ShmSpace(tree.run_id)
        assert 1 <= count_bytes(space, 7) / image(7).nbytes < 2
        consumer = RowConsumer.of(tree, "queue", "train", prefetch=False)
        batch = consumer.get(30.0)
        assert batch.keys == [7, 7, 7]
        views = batch.views("image")
        assert {view.__array_interface__["data"][0] for view in views} == {
            batch.shared("image")[7].__array_interface__["data"][0]
        }
        assert batch.lengths("image") == [image(7).nbytes] * 3
        assert len(batch.packed("image")) == 3 * image(7).nbytes
        assert set(batch.fields) == {"number", "tokens", "image"}
        consumer.ack(batch)
        consumer.flush()
        del views, batch
        eventually(lambda: not space.names("rowq"))


def test_what_does_not_fit_leaves_no_memory_behind(tmp_path):
    with running(tmp_path, spec=SPEC) as tree:
        producer = RowProducer.of(tree, "queue")
        for fields, keys, shared in (
            ({"other": [tokens(1)]}, [], None),
            ({"image": [image(1)]}, [], None),
            ({"number": np.arange(1)}, [7], {"tokens": {7: tokens(1)}}),
            ({"tokens": [tokens(1)]}, [7], {"image": {8: image(1)}}),
        ):
            with pytest.raises(RemoteError):
                producer.put(fields, keys, 1, shared)
        assert ShmSpace(tree.run_id).names("rowq") == []
        with pytest.raises(ValueError, match="or one twice"):
            producer.put({"tokens": [tokens(1)]}, [7], 1, {"tokens": {7: tokens(1)}})
        with pytest.raises(ValueError, match="of groups"):
            producer.put({"tokens": [tokens(1)]}, [7], 1, {"image": {7: image(7)}, "number": {8: tokens(1)}})
        assert producer.put({"tokens": [tokens(1)]}, [7], 1, {"image": {7: image(7)}}) == range(1)


def test_a_producer_goes_on_where_its_sampler_waits_for_more_than_fits(tmp_path):
    """A budget of tokens that is larger than the rows that may be here is no deadlock."""
    group = ConsumerGroup(name="g", needs=("tokens",), sampler=TokenBudget(tokens=40))
    with running(tmp_path, spec=QueueSpec(fields=("tokens",), groups=(group,), max_rows=3)) as tree:
        producer, consumer = RowProducer.of(tree, "queue"), RowConsumer.of(tree, "queue", "g")
        for _ in range(5):
            producer.put({"tokens": [tokens(4)]})
        last = producer.put_async({"tokens": [tokens(4)]})
        batch = consumer.get(30.0)
        assert batch.lengths("tokens") == [7] * 5
        assert not last.done()
        consumer.ack(batch)
        consumer.flush()
        assert last.result() == range(5, 6)


def test_more_memory_than_there_is_is_refused_at_the_start(tmp_path):
    greedy = QueueSpec(fields=PLAIN.fields, groups=PLAIN.groups, max_bytes=1 << 60)
    with pytest.raises((StartFailed, ConfigError), match="max_bytes"), running(tmp_path, spec=greedy):
        pass


@pytest.mark.parametrize(("painter", "looker"), [("b", "a"), ("a", "b"), ("b", "c")])
def test_rows_come_from_and_go_to_other_hosts_and_cross_once(tmp_path, painter, looker):
    log, groups = tmp_path / "seen", 12
    log.touch()
    with loop_hosts(3) as hosts:
        specs = children(log, groups, painter=painter, looker=looker)
        with tree_over(hosts, tmp_path / "run", *specs) as tree:
            queue = tree.ref("queue", RowQueue)
            rows = groups * GROUP_ROWS
            eventually(lambda: queue.ask(RowQueue.progress, "train").result()["acked"] == rows, 60)
            status = tree.ref("dock", RowDock).ask(RowDock.status).result()
        assert [path for path in hosts.memory.rglob("*") if not path.is_dir()] == []
    assert Counter(map(int, log.read_text().split())) == dict.fromkeys(range(groups * GROUP_ROWS), 1)
    media = groups * image(0).nbytes
    for host, nbytes in ((painter, status.taken_bytes), (looker, status.given_bytes)):
        assert (media <= nbytes < 1.02 * media) if host != "a" else nbytes == 0


def test_rows_on_another_host_without_a_dock_are_refused_by_name(tmp_path):
    with loop_hosts(2) as hosts:
        specs = children(tmp_path / "seen", 1, painter="b", looker="a", dock="")[:1]
        both = ChildSpec(id="both", actor=Both, hosts=("b",))
        with (
            tree_over(hosts, tmp_path / "run", *specs, both) as tree,
            pytest.raises(NoWayError, match="memory of a, and this is b"),
        ):
            tree.ref("both", Both).ask(Both.pass_on, 1).result()
