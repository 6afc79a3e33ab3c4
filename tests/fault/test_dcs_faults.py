"""Policy versions while publishers and readers are killed, stopped and starved, as real processes."""

import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from forked_scripts import ForkedScript
from watching import eventually

from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.faults import Action, Fault, plan
from relax_actor.ids import PolicyVersion
from transport.shm import ShmSpace, parse_name

pytestmark = pytest.mark.fault

TENSORS = 6
ELEMENTS = 4096
BUCKET_BYTES = 2 * ELEMENTS * 4 + 192  # two tensors and their head

# Publishes versions, each one's weights made of its number, and says each when it is announced.
PUBLISHER = f"""
import sys
import numpy as np
from relax_actor.dcs import PolicyPublisher
from relax_actor.faults import arm
from transport.shm import ShmSpace

run_id, root, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
arm("trainer", 1)
publisher = PolicyPublisher(ShmSpace(run_id, root), bucket_bytes={BUCKET_BYTES})
first = -1 if publisher.latest() is None else publisher.latest()
print("ready", first, flush=True)
for version in range(first + 1, first + 1 + count):
    weights = [(f"t{{i}}", np.full({ELEMENTS}, version * 10 + i, np.int32)) for i in range({TENSORS})]
    publisher.publish(version, version, weights)
    print(version, flush=True)
"""

# Opens the newest version, checks it, says which, and copies it out once more for every line it is sent.
READER = """
import sys
from relax_actor.dcs import PolicyReceiver
from relax_actor.faults import arm
from transport.shm import ShmSpace

arm("rollout/0", 1)
with PolicyReceiver(ShmSpace(sys.argv[1], sys.argv[2])).open() as snapshot:
    snapshot.verify()
    print("open", snapshot.version, flush=True)
    for _ in sys.stdin:
        snapshot.verify()
        print(*[int(array[0]) for _, array in snapshot.arrays()], flush=True)
"""


@pytest.fixture
def space():
    """A run of its own in real shared memory, of which nothing is left."""
    made = ShmSpace(f"fault{os.getpid()}x{random.getrandbits(32):08x}")
    yield made
    made.sweep()


@pytest.fixture
def start(space):
    """Start a script as a process of its own; whatever is left of it is killed."""
    started = []

    def started_process(source, *args, faults=()):
        arguments = [space.run_id, str(space.root), *map(str, args)]
        started.append(ForkedScript(source, arguments, plan(list(faults))))
        return started[-1]

    yield started_process
    for process in started:
        process.close()


def publish(publisher, version):
    weights = [(f"t{i}", np.full(ELEMENTS, version * 10 + i, np.int32)) for i in range(TENSORS)]
    return publisher.publish(PolicyVersion(version), version, weights)


def check_whole(space, version):
    """Every bit of the version is there, and it is that version's."""
    with PolicyReceiver(space).open(version) as snapshot:
        snapshot.verify()
        for i, (name, array) in enumerate(snapshot.arrays()):
            assert name == f"t{i}"
            assert (array == snapshot.version * 10 + i).all()
        return snapshot.version


def inodes(space, version):
    names = [name for name in space.names("dcs", version) if "manifest" not in name]
    return {(space.root / name).stat().st_ino for name in names}


def wait_stopped(process):
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, poll_s=0.001)


@pytest.mark.parametrize(
    ("step", "nth", "outcome"),
    [
        *[("publish_bucket", nth, ((nth - 1) // 3 - 1, (nth - 1) // 3 - 1)) for nth in range(1, 13)],
        *[("publish_manifest", nth, (nth - 2, nth - 2)) for nth in range(1, 5)],
        *[("publish_latest", nth, (nth - 1, nth - 2)) for nth in range(1, 5)],
    ],
)
def test_a_publisher_killed_at_any_step_leaves_no_torn_version(space, start, step, nth, outcome):
    """Steps of four versions of three buckets each; the third and fourth rewrite recycled memory."""
    visible, announced = outcome  # -1 is none
    victim = start(PUBLISHER, 4, faults=[Fault(actor="trainer", point=step, nth=nth)])
    assert victim.wait() == -signal.SIGKILL

    assert PolicyReceiver(space).latest() == (announced if announced >= 0 else None)
    if announced >= 0:
        assert check_whole(space, None) == announced

    with PolicyPublisher(space, bucket_bytes=BUCKET_BYTES) as successor:
        assert successor.latest() == PolicyReceiver(space).latest() == (visible if visible >= 0 else None)
        left = {parse_name(name).incarnation for name in space.names("dcs")}
        assert left <= {visible - 1, visible}
        for version in sorted(left):
            check_whole(space, version)
        for version in range(visible + 1, visible + 4):
            publish(successor, version)
            assert check_whole(space, None) == version


@pytest.mark.parametrize("seed", range(20))
def test_random_kills_never_show_a_torn_version_or_an_older_one(space, start, seed):
    """Three publishers one after the other, each killed at a random moment while it is read."""
    rng = random.Random(seed)
    receiver = PolicyReceiver(space)
    newest = -1
    for _ in range(3):
        victim = start(PUBLISHER, 10_000)
        assert victim.stdout.readline().split()[0] == "ready"
        for _ in range(rng.randrange(0, 12)):
            said = int(victim.stdout.readline())
            assert check_whole(space, None) >= said
            assert receiver.latest() >= newest
            newest = receiver.latest()
        for _ in range(
            rng.randrange(0, 20_000)
        ):  # no clock is as fine as a loop: any instruction may be the last
            pass
        victim.kill()
        victim.wait()

        latest = receiver.latest()
        if latest is not None:
            assert latest >= newest
            assert check_whole(space, None) == latest
            newest = latest

    with PolicyPublisher(space, bucket_bytes=BUCKET_BYTES) as successor:
        for version in {parse_name(name).incarnation for name in space.names("dcs")}:
            check_whole(space, version)
        last = successor.latest()
        assert (-1 if last is None else last) >= newest


def test_a_stopped_reader_costs_the_publisher_nothing_and_keeps_its_version(space, start):
    with PolicyPublisher(space, bucket_bytes=BUCKET_BYTES) as publisher:
        publish(publisher, 0)
        reader = start(READER)
        assert reader.stdout.readline() == "open 0\n"
        reader.send_signal(signal.SIGSTOP)
        wait_stopped(reader)

        for version in range(1, 21):
            publish(publisher, version)  # it would wait for ever if it waited for the reader

        assert check_whole(space, None) == 20
        assert {parse_name(name).incarnation for name in space.names("dcs")} == {19, 20}

        reader.send_signal(signal.SIGCONT)
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "0 1 2 3 4 5\n"


@pytest.mark.parametrize("alive", [True, False])
def test_a_lease_ends_with_its_process(space, start, alive):
    """What a living reader holds is not rewritten; what a killed one held is."""
    with PolicyPublisher(space, bucket_bytes=BUCKET_BYTES) as publisher:
        publish(publisher, 0)
        held = inodes(space, 0)
        reader = start(READER)
        assert reader.stdout.readline() == "open 0\n"
        if not alive:
            reader.kill()
            reader.wait()

        publish(publisher, 1)
        publish(publisher, 2)

        assert (inodes(space, 2) == held) is not alive
        assert inodes(space, 2).isdisjoint(held) is alive


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_reader_killed_while_it_installs_is_followed_by_one_that_succeeds(space, start, nth):
    with PolicyPublisher(space, bucket_bytes=BUCKET_BYTES) as publisher:
        publish(publisher, 0)
        held = inodes(space, 0)
        reader = start(READER, faults=[Fault(actor="rollout/0", point="install_bucket", nth=nth)])
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.wait() == -signal.SIGKILL

        assert check_whole(space, 0) == 0
        publish(publisher, 1)
        publish(publisher, 2)
        assert inodes(space, 2) == held


def test_a_publisher_stopped_between_bytes_and_manifest_hides_its_version(space, start):
    fault = Fault(actor="trainer", point="publish_manifest", nth=3, action=Action.STOP)
    publisher = start(PUBLISHER, 4, faults=[fault])
    assert [publisher.stdout.readline() for _ in range(3)] == ["ready -1\n", "0\n", "1\n"]
    wait_stopped(publisher)

    assert check_whole(space, None) == 1

    publisher.send_signal(signal.SIGCONT)
    assert [publisher.stdout.readline() for _ in range(2)] == ["2\n", "3\n"]
    assert check_whole(space, None) == 3


SMALL = """
import numpy as np
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from transport.shm import SegmentSpaceError, ShmSpace

space = ShmSpace("small", ROOT)
weights = [("w", np.ones(100_000, np.uint8)), ("v", np.ones(100_000, np.uint8))]
with PolicyPublisher(space, bucket_bytes=100_000) as publisher:
    for version in range(4):
        publisher.publish(version, version, weights)
    try:
        publisher.publish(4, 4, [("w", np.ones(600_000, np.uint8)), ("v", np.ones(600_000, np.uint8))])
    except SegmentSpaceError as error:
        print(error.need_bytes, error.have_bytes < 600_000, "hint" in str(error))
    with PolicyReceiver(space).open() as snapshot:
        snapshot.verify()
        print(snapshot.version)
    for version in range(4, 8):
        publisher.publish(version, version, weights)
    print(PolicyReceiver(space).latest(), len(space.names()))
"""


def test_one_mebibyte_of_shared_memory_is_an_error_and_never_a_sigbus(tmp_path):
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -P -c "$SOURCE"'
    if shutil.which("unshare") is None or subprocess.call(["unshare", "-Urm", "true"]) != 0:
        pytest.skip("user namespaces are not allowed here, so no small tmpfs can be mounted")

    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount],
        env=os.environ | {"SOURCE": f"ROOT = {str(tmp_path)!r}\n{SMALL}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["600128 True True", "3", "7 7"]
