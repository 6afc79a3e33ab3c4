"""Large rows on their way between hosts, one end of which dies or stands still in the middle of them."""

import os
import secrets
import shutil
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from namespaces import make_network, tear_down
from watching import eventually

from relax_actor import Actor, ChildSpec, Supervisor, SupervisorSpec, endpoint, faults
from relax_actor.errors import ActorDied
from relax_actor.faults import Action, Fault
from relax_actor.homes import LoopHosts
from relax_actor.ids import Holder
from relax_actor.protocol import TensorRef
from relax_actor.roles.dock import RowDock
from relax_actor.roles.rows import rows_of
from relax_actor.supervision.hosts import Host
from relax_actor.supervision.spec import Backoff
from relax_actor.transfer_queue.storage import RowReader
from transport.address import Address
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

ADDRESS = "127.0.0.1"
ROW_BYTES = 6 << 20
QUICK = Backoff(base_s=0.02, cap_s=0.1)


class Sink(Actor):
    """Reads rows on the queue's host, and frees them."""

    def __init__(self) -> None:
        self._space = ShmSpace(self.ctx.run_id, self.ctx.shm_root)
        self._reader = RowReader(self._space)

    @endpoint
    def take(self, ref: TensorRef) -> str:
        """Return the checksum of a row, which is freed."""
        found = xxhash.xxh3_64_hexdigest(self._reader.read(ref))
        self._space.unlink(ref.segment)
        return found

    @endpoint
    def left(self) -> list[str]:
        """Return what is there of producers."""
        return self._space.names("producer")


class Producer(Actor):
    """Puts rows from another host, and reads them back."""

    def __init__(self) -> None:
        self._rows = rows_of(self.ctx, LoopHosts(rows="near"))
        self._sink = self.ctx.ref("sink", Sink)

    @endpoint(timeout_s=60.0)
    def put(self, rows: int) -> tuple[list[str], list[str], int]:
        """Put rows; return what was written, what was read there, and how often one was sent again."""
        arrays = [np.random.default_rng(n).integers(0, 256, ROW_BYTES, np.uint8) for n in range(rows)]
        handed = [self._rows.hand_over([self._rows.write([{"a": array}])[0]["a"]]) for array in arrays]
        found, repeats = [], 0
        for each in handed:
            landing = each
            while True:
                while (missing := landing.missing()) is not None:
                    missing.exception()
                if not landing.failure():
                    break
                repeats += 1
                landing = self._rows.hand_over(landing.sent, again=True)
            found.append(self._sink.ask(Sink.take, landing.records()[0]).result())
        return [xxhash.xxh3_64_hexdigest(array) for array in arrays], found, repeats

    @endpoint
    def begin(self, rows: int) -> None:
        """Put rows, and do not wait for them."""
        for n in range(rows):
            array = np.full(ROW_BYTES, n, np.uint8)
            self._rows.hand_over([self._rows.write([{"a": array}])[0]["a"]])


@pytest.fixture
def start(tmp_path):
    """Start a tree on two hosts, of one machine or of a network, under a plan of faults."""
    memory = Path("/dev/shm") / f"relax-actor-links-{secrets.token_hex(4)}"  # noqa: S108 - what it is for
    trees = []

    def start(*plan, network=None):
        near, far, prefix = ADDRESS, ADDRESS, ("env",)
        if network is not None:
            near, far, prefix = network.head, network.address("a"), network.inside("a")
        hosts = [Host(name="near", address=near, shm_root=str(memory / "near"))]
        hosts.append(Host(name="far", prefix=prefix, address=far, shm_root=str(memory / "far")))
        for host in hosts:
            Path(host.shm_root).mkdir(parents=True)
        env = faults.plan(list(plan))
        children = (
            ChildSpec(id="dock", actor=RowDock, hosts=("near",), env=env, backoff=QUICK),
            ChildSpec(id="sink", actor=Sink, hosts=("near",)),
            ChildSpec(id="producer", actor=Producer, hosts=("far",), env=env, backoff=QUICK),
        )
        tree = Supervisor(
            SupervisorSpec(id="root", children=children),
            hosts=hosts,
            address=near,
            shm_root=str(memory / "near"),
            run_dir=tmp_path,
        )
        trees.append(tree.__enter__())
        return trees[-1]

    yield start
    for tree in trees:
        tree.__exit__(None, None, None)
    left = [path for path in memory.rglob("*") if not path.is_dir()]
    shutil.rmtree(memory, ignore_errors=True)
    assert left == []


@pytest.fixture
def network():
    network = make_network(f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}.", 24)
    yield network
    tear_down(network)


def test_a_dock_killed_in_the_middle_of_rows_costs_no_byte(start):
    kills = [Fault(actor="dock", point="part_taken", nth=3)]
    kills += [Fault(actor="dock", point="part_taken", nth=9, incarnation=2)]
    kills += [Fault(actor="dock", point="parcel_docked", nth=2, incarnation=3)]
    tree = start(*kills)
    written, found, repeats = tree.ref("producer", Producer).ask(Producer.put, 6).result()
    assert found == written
    assert repeats
    eventually(lambda: tree.ref("dock", RowDock).ask(RowDock.status).result().arriving == 0)
    eventually(lambda: tree.ref("sink", Sink).ask(Sink.left).result() == [])


def test_a_dock_that_stands_still_is_replaced_and_the_rows_are_sent_again(start):
    tree = start(Fault(actor="dock", point="part_taken", nth=4, action=Action.STOP))
    reply = tree.ref("producer", Producer).ask(Producer.put, 3)
    pid = tree.pid("dock")
    eventually(lambda: Path(f"/proc/{pid}/status").read_text().find("T (stopped)") >= 0)
    os.kill(pid, signal.SIGKILL)  # as whoever finds out that it does not answer
    written, found, repeats = reply.result()
    assert found == written
    assert repeats


def test_a_producer_killed_in_the_middle_of_a_row_leaves_nothing_of_it(start):
    tree = start(Fault(actor="producer", point="parcel_sent", nth=3))
    dock, producer, first = tree.ref("dock", RowDock), tree.ref("producer", Producer), tree.pid("producer")
    with suppress(ActorDied):  # it may be dead before it can answer
        producer.ask(Producer.begin, 8).result()
    eventually(lambda: tree.pid("producer") not in {None, first})
    eventually(lambda: dock.ask(RowDock.status).result().arriving == 0)
    eventually(lambda: tree.ref("sink", Sink).ask(Sink.left).result() == [])
    written, found, _ = producer.ask(Producer.put, 1).result()
    assert found == written


def test_rows_on_a_link_that_is_cut_for_a_moment_go_on_where_they_were(start, network):
    tree = start(network=network)
    reply = tree.ref("producer", Producer).ask(Producer.put, 20)
    dock = tree.ref("dock", RowDock)
    eventually(lambda: dock.ask(RowDock.status).result().parts > 10)
    network.cut("a")
    time.sleep(1.0)  # how long it is cut
    network.heal("a")
    written, found, repeats = reply.result()
    assert found == written
    assert not repeats


def test_a_stranger_at_the_docks_port_hears_nothing(start):
    tree = start()
    producer, dock = tree.ref("producer", Producer), tree.ref("dock", RowDock)
    producer.ask(Producer.put, 1).result()
    address = Address.parse(dock.ask(RowDock.admit, Holder("nobody", 1), 1).result().address)
    with socket.create_connection((address.host, address.port), timeout=60) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(64))
        with suppress(ConnectionError):  # what it said was not read to its end
            assert stranger.recv(100) == b""
    eventually(lambda: dock.ask(RowDock.status).result().strangers_refused >= 1)
    assert dock.ask(RowDock.status).result().links == 1
