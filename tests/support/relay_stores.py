"""The stores of a relay as processes of one tree; the test is the publisher."""

import secrets
from contextlib import contextmanager

from relax_actor import Backoff, ChildSpec, Intensity, Supervisor, SupervisorSpec
from relax_actor.dcs import PolicyReceiver
from relax_actor.faults import plan
from relax_actor.roles.store import PolicyStore
from relax_actor.supervision.supervisor import DEFAULT_ZYGOTES
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace


class StorePlay:
    """A tree of stores, each with a folder of shared memory, and what it shows."""

    names: tuple[str, ...]
    zygote = "default"
    zygotes = DEFAULT_ZYGOTES

    def __init__(self, tmp_path, root):
        self.tmp_path, self.root, self.run_id = tmp_path, root, secrets.token_hex(4)
        self.seen = dict.fromkeys(self.names, -1)

    def space(self, name):
        return ShmSpace(self.run_id, self.root / name)

    @contextmanager
    def stores(self, faults, **args):
        """Start the stores; `args` are of each."""
        for name in self.names:
            (self.root / name).mkdir()
        children = tuple(
            ChildSpec(
                id=name,
                actor=PolicyStore,
                args={"chain": self.names, "shm_root": str(self.root / name), **args},
                env=plan(list(faults)),
                zygote=self.zygote,
            )
            for name in self.names
        )
        spec = SupervisorSpec(
            id="root",
            backoff=Backoff(base_s=0.01, cap_s=0.02),
            intensity=Intensity(restarts=1000, within_s=60.0),
            children=children,
        )
        run_dir = self.tmp_path / "run"
        with Supervisor(spec, run_dir=run_dir, run_id=self.run_id, zygotes=self.zygotes) as tree:
            yield tree

    def events(self, kind):
        events, _ = read_events(self.tmp_path / "run/events.jsonl")
        return [event for event in events if event["kind"] == kind]

    def check(self, name):
        """Return the newest version of a store; nothing torn is visible, none is older than one before."""
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
