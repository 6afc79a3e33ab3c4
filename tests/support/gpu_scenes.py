"""What must hold of the GPU routes, as scenes that run on real GPUs and on GPUs made of files alike."""

import contextlib
import os
import signal

from gpu_play import SMALL, PlayReplica, PlayStore, PlayTrainer, expected_digest, retried
from watching import eventually

from relax_actor import Backoff, ChildSpec, Supervisor, SupervisorSpec
from relax_actor.dcs.manifest import OWNER
from relax_actor.dcs.receiver import PolicyReceiver
from relax_actor.dcs.routes import Route
from relax_actor.faults import plan
from transport.shm import ShmSpace

GPU_ROUTES = (Route.CUDA_IPC, Route.PINNED)
ROUTES = (*GPU_ROUTES, Route.SHARED_MEMORY)


class Play:
    """The tree of a scene."""

    def __init__(self, tree, replicas):
        self.tree = tree
        self.trainer = tree.ref("trainer", PlayTrainer)
        self.store = tree.ref("store", PlayStore)
        self.replicas = [
            tree.ref("replica" if replicas == 1 else f"replica/{i}", PlayReplica).within(60)
            for i in range(replicas)
        ]
        self.replica = self.replicas[0]
        self.space = ShmSpace(tree.run_id)
        self.version = -1

    def publish(self):
        """Publish the next version; return the trainer's GPU, and whether it offers the version."""
        self.version += 1
        return retried(lambda: self.trainer.within(60).ask(PlayTrainer.publish, self.version))

    def install(self, routes=ROUTES):
        """Have the replica install the newest version."""
        return retried(lambda: self.replica.ask(PlayReplica.install, self.version, routes))

    def expected(self, shapes=SMALL):
        """Return the checksum of the newest version."""
        return expected_digest(shapes, self.version)

    def is_idle(self):
        eventually(lambda: retried(lambda: self.store.ask(PlayStore.transfers)) == 0)


@contextlib.contextmanager
def play(tmp_path, stage, *, faults=(), replicas=1, trainer=None, store=None, replica=None):
    """Start trainer, store and replicas, and see that they leave nothing.

    Args:
        tmp_path: for the run.
        stage: `kind` and `env` for each of trainer, store and replica.
        faults: what happens to them.
        replicas: how many.
        trainer: further arguments of the actor.
        store: likewise.
        replica: likewise.
    """
    common = {"zygote": "torch", "start_timeout_s": 120.0}
    armed = plan(list(faults))

    def child(name, actor, args, **more):
        kind, env = stage[name]
        return ChildSpec(
            id=name, actor=actor, args={"kind": kind, **(args or {})}, env={**env, **armed}, **common, **more
        )

    children = (
        child("store", PlayStore, store),
        child("trainer", PlayTrainer, trainer),
        child("replica", PlayReplica, replica, replicas=replicas),
    )
    spec = SupervisorSpec(id="root", backoff=Backoff(base_s=0.01, cap_s=0.05), children=children)
    with Supervisor(spec, run_dir=tmp_path / "run", zygotes={"default": (), "torch": ("torch",)}) as tree:
        scene = Play(tree, replicas)
        yield scene
    assert scene.space.names() == []


def every_route_is_bit_exact(scene, shapes=SMALL):
    """Versions arrive bit for bit by each route, again and again."""
    for _ in range(3):
        scene.publish()
        for route in ROUTES:
            result = scene.install((route,))
            assert not result.error
            assert (result.route, result.digest) == (route, scene.expected(shapes))
    scene.is_idle()


def without_a_snapshot_the_other_routes_work(scene):
    """A trainer that keeps no snapshot packs through its scratch."""
    for _ in range(3):
        assert not scene.publish()[1]
        result = scene.install()
        assert (result.route, result.digest) == (Route.PINNED, scene.expected())
        assert "no GPU offers" in dict(result.failures)[Route.CUDA_IPC]


def devices_are_known_by_uuid(scene):
    """The replica sees one GPU, called 0, which is another one than the trainer's 0."""
    trainers, is_on_gpu = scene.publish()
    assert is_on_gpu
    assert scene.replica.ask(PlayReplica.where).result() != trainers
    assert scene.install((Route.CUDA_IPC,)).digest == scene.expected()


def a_flipped_byte_is_refused_by_name(scene):
    """Damage in a page-locked bucket is named, and another route is taken."""
    scene.publish()
    version = scene.version
    with PolicyReceiver(scene.space).open(version) as snapshot:
        bucket = len(snapshot.manifest.buckets) - 1
    path = scene.space.root / scene.space.name(OWNER, version, f"b{bucket}")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    refused = scene.install((Route.PINNED, Route.SHARED_MEMORY))
    for route in (Route.PINNED, Route.SHARED_MEMORY):
        assert f"bucket {bucket} of policy version {version} is corrupt" in dict(refused.failures)[route]
    good = scene.install()
    assert (good.route, good.digest) == (Route.CUDA_IPC, scene.expected())


def a_store_killed_in_mid_fill_costs_a_route(scene):
    """`faults` kill the store's first incarnation while it fills: another route brings the version whole."""
    scene.publish()
    result = scene.install()
    assert result.digest == scene.expected()
    assert result.failures[0][0] == Route.CUDA_IPC
    scene.is_idle()  # it is back
    result = scene.install((Route.CUDA_IPC,))
    assert result.digest == scene.expected(), result


def a_replica_killed_in_mid_install_costs_nobody_else(scene):
    """`faults` kill the replica's first incarnation while it installs: store and trainer go on."""
    pids = scene.tree.pid("store"), scene.tree.pid("trainer")
    scene.publish()
    result = scene.install((Route.CUDA_IPC,))  # by the second incarnation
    assert result.digest == scene.expected()
    scene.is_idle()
    assert (scene.tree.pid("store"), scene.tree.pid("trainer")) == pids


def a_stopped_trainer_is_not_needed(scene):
    """A replica is killed, restarted and brought to the current version while the trainer is stopped."""
    scene.publish()
    assert scene.install().digest == scene.expected()
    scene.publish()
    trainer = scene.tree.pid("trainer")
    os.kill(trainer, signal.SIGSTOP)
    try:
        os.kill(scene.tree.pid("replica"), signal.SIGKILL)
        for route in ROUTES:
            result = scene.install((route,))
            assert (result.route, result.digest) == (route, scene.expected())
    finally:
        os.kill(trainer, signal.SIGCONT)
    scene.publish()
    assert scene.tree.pid("trainer") == trainer


def a_dead_trainers_snapshot_is_gone_and_the_host_still_has_the_version(scene):
    """The GPU route closes with the trainer; the page-locked buckets stay."""
    scene.publish()
    assert scene.install().route == Route.CUDA_IPC
    old = scene.tree.pid("trainer")
    os.kill(old, signal.SIGKILL)
    eventually(lambda: scene.tree.pid("trainer") not in {None, old})
    result = scene.install(GPU_ROUTES)
    assert (result.route, result.digest) == (Route.PINNED, scene.expected())
    scene.publish()
    assert scene.install().route == Route.CUDA_IPC


def a_stopped_store_is_given_up(scene):
    """A store that stands still costs its patience, and the version comes without it."""
    scene.publish()
    store = scene.tree.pid("store")
    os.kill(store, signal.SIGSTOP)
    try:
        result = scene.install((Route.CUDA_IPC, Route.SHARED_MEMORY))
        assert (result.route, result.digest) == (Route.SHARED_MEMORY, scene.expected())
    finally:
        os.kill(store, signal.SIGCONT)
    assert scene.install((Route.CUDA_IPC,)).digest == scene.expected()


def many_replicas_install_at_once(scene):
    """Each has a ring of its own for as long as it needs it."""
    for _ in range(3):
        scene.publish()
        replies = [ref.ask(PlayReplica.install, scene.version, GPU_ROUTES) for ref in scene.replicas]
        assert {reply.result().digest for reply in replies} == {scene.expected()}
    scene.is_idle()


def a_trainer_killed_while_it_publishes_leaves_no_half_version(scene):
    """`faults` kill the trainer's first incarnation: its next one publishes, and only whole versions show."""
    scene.trainer.ask(PlayTrainer.publish, 0).exception()
    scene.version += 1
    scene.publish()
    for route in ROUTES:
        assert scene.install((route,)).digest == scene.expected()


CALM = (  # scenes that can be played in any order in one tree
    every_route_is_bit_exact,
    devices_are_known_by_uuid,
    a_flipped_byte_is_refused_by_name,
    a_stopped_trainer_is_not_needed,
    a_dead_trainers_snapshot_is_gone_and_the_host_still_has_the_version,
    a_stopped_store_is_given_up,
)
