"""Hosts of one relay chain in one process: a folder of shared memory and a listener each, real streams."""

import secrets
import shutil
import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import watching

from relax_actor.actor.store import open_store
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.dcs.relay.carrier import GlooCarrier
from relax_actor.dcs.relay.chain import Chain
from relax_actor.dcs.relay.intake import Intake
from relax_actor.dcs.relay.leading import Leader
from relax_actor.dcs.relay.pulling import Puller
from relax_actor.dcs.relay.records import RelayError
from relax_actor.dcs.relay.riding import Rider
from relax_actor.dcs.relay.serving import ServingLink
from relax_actor.dcs.shelf import Shelf
from relax_actor.dcs.store import HostStore
from relax_actor.errors import CallTimeout, Executed
from relax_actor.ids import Holder, PolicyVersion
from transport.errors import TransportError
from transport.shm import ShmSpace
from transport.stream import Stream, StreamListener

PATIENCE_S = 20.0
ALIVE_S = 0.25
SUSPECT_S = 4.0
GROUP_S = 8.0
"""Most of them are only met where somebody stands still, and a busy machine stands still for seconds."""


@contextmanager
def relay_root():
    """Yield a folder in shared memory, for one of each host."""
    root = Path("/dev/shm") / f"relay-{secrets.token_hex(4)}"  # noqa: S108 - shared memory
    root.mkdir()
    yield root
    shutil.rmtree(root)


def weights(version, *, tensors=6, elements=1000):
    return [(f"t{i}", np.full(elements, version * 10 + i, np.int32)) for i in range(tensors)]


eventually = partial(watching.eventually, poll_s=0.002)
"""A version is on its way for milliseconds."""


class PausableStore(HostStore):
    """A store whose buckets are on their way for as long as a test wants."""

    paused = False
    looks = True  # whether what was published is seen

    def latest(self):
        found = super().latest()
        if self.looks:
            self._last = found
        return getattr(self, "_last", None)

    def holds(self, version, bucket):
        return super().holds(version, bucket) and not (self.paused and bucket)


class RelayHost:
    """One host. `before` are the hosts that come before it in the chain, the publisher's first."""

    def __init__(
        self,
        name,
        space,
        before=(),
        *,
        keep=2,
        budget_bytes=0,
        suspect_s=SUSPECT_S,
        group_s=GROUP_S,
        proxies=None,
        group=(),
        incarnation=1,
        join=None,
    ):
        self.name, self.space, self.before = name, space, tuple(before)
        self.events = []
        self.links = []
        self.failure = None
        self._group_s = group_s
        shelf = Shelf(space, keep=keep, budget_bytes=budget_bytes) if before else None
        self.store = PausableStore(space, shelf)
        self.receiver = PolicyReceiver(space)
        self.listener = StreamListener("127.0.0.1", PATIENCE_S)
        self.away = False  # whether it does not answer
        self.proxies = proxies or {}  # by upstream: takes the address, gives another
        self._closed = threading.Event()
        self.puller = self.leader = None
        self.holder = Holder(name, incarnation)
        if before:
            chain = Chain([host.name for host in before], suspect_s=suspect_s)
            intake = Intake(self.store, self.emit)
            rider = Rider(intake, self.ask, join or self.join, retry_s=0.02) if group else None
            self.puller = Puller(self.store, intake, chain, self.dial, self.emit, retry_s=0.02, rider=rider)
            target = self.pull
        else:
            target = self.look
            if group:
                self.leader = Leader(
                    self.store,
                    self.holder,
                    group,
                    self.emit,
                    open_meeting=lambda: open_store("127.0.0.1"),
                    join=join or self.join,
                )
                self._leading = threading.Thread(target=self.leader.run, daemon=True)
        self._thread = threading.Thread(target=target, daemon=True)

    def start(self):
        self._thread.start()
        if self.leader is not None:
            self._leading.start()
        return self

    def emit(self, kind, /, **fields):
        self.events.append({"kind": kind, **fields})

    def of(self, kind):
        return [event for event in self.events if event["kind"] == kind]

    def look(self):
        while not self._closed.wait(0.005):
            self.store.look()

    def pull(self):
        try:
            self.puller.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.failure = error

    def ask(self, have):
        return self.before[0].leader.seat(self.holder, have)

    def join(self, seat, meeting=None):
        return GlooCarrier(seat, "127.0.0.1", meeting, deadline_s=self._group_s)

    def dial(self, name, epoch):
        upstream = next(host for host in self.before if host.name == name)
        if upstream.away:
            raise CallTimeout(name, "link", PATIENCE_S, Executed.NO, "it is away")
        link = ServingLink(upstream.store, self.name, epoch, alive_s=ALIVE_S)
        upstream.links.append(link)
        ticket = upstream.listener.ticket(lambda stream: upstream.serve(link, stream))
        address = self.proxies.get(name, lambda address: address)(upstream.listener.address)
        return Stream.connect(address, ticket, PATIENCE_S)

    def serve(self, link, stream):
        with suppress(TransportError, RelayError):
            link.run(stream)

    def cut(self):
        """All links of this host, up and down, break."""
        for link in self.links:
            link.close()

    def has(self, version):
        return self.receiver.latest() == version

    def values(self, version=None):
        """The first element of every tensor of a version, all of which was verified."""
        with self.receiver.open(version) as snapshot:
            snapshot.verify()
            found = []
            for _, array in snapshot.arrays():
                assert (array == array[0]).all()
                found.append(int(array[0]))
        return snapshot.version, found

    def close(self):
        self._closed.set()
        self.listener.close()
        self.cut()
        if self.puller is not None:
            self.puller.close()
        if self.leader is not None:
            self.leader.close()
            self._leading.join(60)
            assert not self._leading.is_alive()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.store.close()


class RelayPlay:
    """Hosts `a` (the publisher's), `b`, `c`, … of one run."""

    def __init__(self, root, run_id):
        self._root, self._run_id = root, run_id
        self.hosts = []
        self._publisher = None

    def space(self, name):
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return ShmSpace(self._run_id, folder)

    def host(self, name, **settings):
        host = RelayHost(name, self.space(name), self.hosts, **settings).start()
        self.hosts.append(host)
        return host

    def chain(self, *names, **settings):
        return [self.host(name, **settings) for name in names]

    def publisher(self, **settings):
        if self._publisher is None:
            self._publisher = PolicyPublisher(self.space("a"), **{"bucket_bytes": 9000, **settings})
        return self._publisher

    def publish(self, version, **shape):
        return self.publisher().publish(PolicyVersion(version), version, weights(version, **shape))

    def close(self):
        for host in self.hosts:
            if host.leader is not None:
                host.leader.close()  # before those it would seat
        for host in reversed(self.hosts):
            host.close()
        if self._publisher is not None:
            self._publisher.close()


class FlippingProxy:
    """Passes bytes on, and flips bits where it is told to.

    Args:
        flip: which bytes of the stream down to flip, counted from the first.
    """

    def __init__(self, flip):
        self._flip = set(flip)
        self.passed_bytes = 0

    def __call__(self, address):
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._run, args=(server, address), daemon=True).start()
        return type(address).tcp("127.0.0.1", server.getsockname()[1])

    def _run(self, server, address):
        with server:
            down, _ = server.accept()
        up = socket.create_connection((address.host, address.port))
        threading.Thread(target=self._copy, args=(down, up), daemon=True).start()
        self._copy(up, down, flips=True)

    def _copy(self, source, target, *, flips=False):
        with suppress(OSError), source, target:
            while data := bytearray(source.recv(65536)):
                if flips:
                    for index in [each for each in self._flip if 0 <= each - self.passed_bytes < len(data)]:
                        self._flip.discard(index)
                        data[index - self.passed_bytes] ^= 1
                    self.passed_bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
