"""A tree over several hosts: network namespaces of this machine, with links that are cut and healed."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from sample_actors import Counter, Relay

from relax_actor import Backoff, ChildSpec, Supervisor, SupervisorSpec, app
from relax_actor.config import Config, DataConfig, DcsConfig, ModelConfig
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.errors import ActorDied, StartFailed
from relax_actor.node.lease import LeaseTerms
from relax_actor.roles.store import PolicyStore
from relax_actor.supervision.hosts import Host
from relax_actor.telemetry import read_events
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

TERMS = LeaseTerms(ttl_s=2.0, renew_s=0.3, margin_s=0.3)
QUICK = Backoff(base_s=0.01, cap_s=0.05)
# As ssh: killing it here leaves what it started running there, and its end says nothing.
LIKE_SSH = ("sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & exec 3<&- <&-; wait; exit 255', "sh")


@dataclass
class Network:
    """A bridge, and namespaces on it named `a` and `b`; this process' namespace is the head's."""

    tag: str
    head: str
    made: list[list[str]] = field(default_factory=list)

    def namespace(self, name):
        return f"rx{self.tag}{name}"

    def host(self, name, tmp_path, *, inside=(), outside=()):
        shm = tmp_path / f"shm-{name}"
        shm.mkdir()
        address = self.head.rpartition("::" if ":" in self.head else ".")[0]
        number = 10 + ord(name) - ord("a")
        return Host(
            name=name,
            prefix=(*outside, "ip", "netns", "exec", self.namespace(name), *inside),
            address=f"{address}{'::' if ':' in self.head else '.'}{number}",
            shm_root=str(shm),
        )

    def cut(self, name):
        ip("link", "set", f"v{self.tag}{name}", "down")

    def heal(self, name):
        ip("link", "set", f"v{self.tag}{name}", "up")


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def build(network, prefix, width):
    bridge, nodad = f"br{network.tag}", ["nodad"] if ":" in prefix else []
    ip("link", "add", bridge, "type", "bridge")
    ip("addr", "add", f"{network.head}/{width}", "dev", bridge, *nodad)
    ip("link", "set", bridge, "up")
    for number, name in enumerate("ab", start=10):
        space, link = network.namespace(name), f"v{network.tag}{name}"
        ip("netns", "add", space)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", link, "master", bridge, "up")
        inside = ["netns", "exec", space, "ip"]
        ip(*inside, "addr", "add", f"{prefix}{number}/{width}", "dev", "eth0", *nodad)
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "link", "set", "lo", "up")


def tear_down(network):
    for name in "ab":
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", network.namespace(name))
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", f"v{network.tag}{name}")
    with suppress(subprocess.CalledProcessError):
        ip("link", "del", f"br{network.tag}")


def make_network(prefix, width):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make network namespaces")
    network = Network(tag=secrets.token_hex(2), head=f"{prefix}1")
    try:
        build(network, prefix, width)
    except subprocess.CalledProcessError as error:
        tear_down(network)
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    return network


@pytest.fixture
def network():
    network = make_network(f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}.", 24)
    yield network
    tear_down(network)


@pytest.fixture
def network6():
    network = make_network(f"fd00:{secrets.token_hex(2)}::", 64)
    yield network
    tear_down(network)


def tree_on(network, tmp_path, hosts, *children, **settings):
    return Supervisor(
        SupervisorSpec(id="root", backoff=QUICK, children=children),
        run_dir=tmp_path / "run",
        hosts=hosts,
        address=network.head,
        lease=TERMS,
        **settings,
    )


def counter_on(*hosts, **fields):
    return ChildSpec(id="counter", actor=Counter, hosts=hosts, **fields)


def eventually(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def events_of(tree, kind):
    return [event for event in read_events(tree.run_dir / "events.jsonl")[0] if event["kind"] == kind]


def net_of(pid):
    return Path(f"/proc/{pid}/ns/net").readlink()


def agent_of(tree, name):
    return psutil.Process(tree.pid(name)).parent()


def test_replicas_take_the_hosts_in_turn_and_actors_call_one_another_across_them(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    counters = counter_on("a", "b", replicas=3)
    relays = ChildSpec(id="relay", actor=Relay, hosts=("b", "a"), replicas=2)
    with tree_on(network, tmp_path, hosts, counters, relays) as tree:
        nets = [net_of(tree.pid(f"counter/{index}")) for index in range(3)]
        assert nets[0] == nets[2] != nets[1] != net_of(os.getpid())
        for relay in ("relay/0", "relay/1"):
            for counter in ("counter/0", "counter/1", "counter/2"):
                tree.ref(relay, Relay).ask(Relay.add_via, counter, 1).result()
        assert tree.ref("counter/1", Counter).ask(Counter.add, 0).result() == 2
        pids = [tree.pid(f"counter/{index}") for index in range(3)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_barrier_names_who_is_missing_and_what_is_known_of_them(network, tmp_path):
    late = Host(name="late", prefix=("sh", "-c", "echo on my way; sleep 600"), address=network.head)
    tree = tree_on(
        network, tmp_path, [network.host("a", tmp_path), late], counter_on("a"), join_timeout_s=8.0
    )
    expected = r'1 of 2 hosts joined; missing: late \(started, pid \d+, last log: "on my way"\)'
    with pytest.raises(StartFailed, match=expected), tree:
        pass


def test_an_agent_that_cannot_start_is_named_at_once(network, tmp_path):
    broken = Host(name="broken", prefix=("sh", "-c", "echo no such place; exit 3"), address=network.head)
    started = time.monotonic()
    expected = r'missing: .*broken \(ended with exit code 3, last log: "no such place"\)'
    with (
        pytest.raises(StartFailed, match=expected),
        tree_on(network, tmp_path, [network.host("a", tmp_path), broken], counter_on("a")),
    ):
        pass
    assert time.monotonic() - started < 30


def test_behind_a_cut_link_actors_end_by_themselves_before_they_are_restarted_elsewhere(network, tmp_path):
    """No two incarnations at once: the fence acts before the head gives the host up."""
    hosts = [network.host("a", tmp_path, outside=LIKE_SSH), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a", "b")) as tree:
        counter = tree.ref("counter", Counter)
        child = psutil.Process(counter.ask(Counter.spawn_child).result())
        old, agent = psutil.Process(tree.pid("counter")), agent_of(tree, "counter")
        keeper, place = agent.parent(), net_of(old.pid)
        reply = counter.ask(Counter.sleep, 60.0)
        network.cut("a")
        cut = time.monotonic()
        eventually(lambda: not old.is_running())
        gone_s = time.monotonic() - cut
        assert TERMS.ttl_s - 2 * TERMS.renew_s < gone_s < TERMS.ttl_s + 0.5
        with pytest.raises(ActorDied, match="renewed no lease"):
            reply.result(20)
        eventually(lambda: not (keeper.is_running() or agent.is_running() or child.is_running()))
        pid, incarnation = counter.within(20).ask(Counter.where).result()
        assert incarnation == 2
        assert net_of(pid) != place
        [lost] = events_of(tree, "host_lost")
        assert lost["m"] - cut >= gone_s
        network.heal("a")
        eventually(lambda: len(events_of(tree, "host_joined")) == 3)
        assert counter.ask(Counter.where).result() == (pid, 2)
    assert [event["incarnation"] for event in events_of(tree, "child_spawned")] == [1, 2]


def test_a_link_that_heals_in_time_costs_nobody_anything(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a"), ChildSpec(id="relay", actor=Relay)) as tree:
        network.cut("a")
        time.sleep(TERMS.ttl_s / 3)  # the length of the outage, not a wait for something
        network.heal("a")
        relay = tree.ref("relay", Relay)
        assert relay.within(20).ask(Relay.add_via, "counter", 1).result() == 1
        time.sleep(TERMS.patience_s)  # a lease that was lost would be noticed by then
        assert tree.ref("counter", Counter).ask(Counter.where).result()[1] == 1
    assert not events_of(tree, "host_lost")


def test_what_was_said_while_a_connection_broke_arrives_all_the_same(network, tmp_path):
    """Orders to the agent, news to an actor: both were on a connection that is gone."""
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    relay = ChildSpec(id="relay", actor=Relay, hosts=("a",))
    with tree_on(network, tmp_path, hosts, counter_on("a"), relay) as tree:
        network.cut("a")
        tree.add_child("root", ChildSpec(id="late", actor=Counter, hosts=("a",)))
        tree.add_child("root", ChildSpec(id="far", actor=Counter, hosts=("b",)))
        assert tree.ref("far", Counter).ask(Counter.add, 1).result() == 1
        destroyed = subprocess.run(
            ["ip", "netns", "exec", network.namespace("a"), "ss", "-HK", "dst", network.head],
            check=False,
            capture_output=True,
            text=True,
        )
        if not destroyed.stdout:
            pytest.skip(f"connections cannot be destroyed here: {destroyed.stderr.strip()}")
        network.heal("a")
        assert tree.ref("late", Counter).within(20).ask(Counter.add, 1).result() == 1
        via = tree.ref("relay", Relay).within(20)
        assert via.ask(Relay.add_via, "far", 1).result() == 2
    assert not events_of(tree, "host_lost")


def test_an_agent_that_was_given_up_is_refused_when_it_comes_back(network, tmp_path):
    """Keeper, agent and actor are frozen, as by a hypervisor; when they thaw, others have their place."""
    hosts = [network.host("a", tmp_path, outside=LIKE_SSH), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a", "b")) as tree:
        agent = agent_of(tree, "counter")
        frozen = [agent.parent(), agent, *agent.children(recursive=True)]
        network.cut("a")
        for process in frozen:
            process.suspend()
        counter = tree.ref("counter", Counter)
        eventually(lambda: events_of(tree, "host_lost"))
        assert counter.within(20).ask(Counter.add, 5).result() == 5
        network.heal("a")
        for process in frozen:
            with suppress(psutil.NoSuchProcess):  # the first to thaw, the keeper, kills the others
                process.resume()
        eventually(lambda: not any(process.is_running() for process in frozen))
        assert counter.ask(Counter.add, 1).result() == 6
    assert [event["incarnation"] for event in events_of(tree, "child_spawned")] == [1, 2]


def test_the_actors_of_a_stopped_agent_end_and_are_restarted_elsewhere_once(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a", "b")) as tree:
        old, place = psutil.Process(tree.pid("counter")), net_of(tree.pid("counter"))
        agent_of(tree, "counter").suspend()
        stopped = time.monotonic()
        eventually(lambda: not old.is_running())
        assert time.monotonic() - stopped < TERMS.ttl_s + 0.5
        pid, incarnation = tree.ref("counter", Counter).within(20).ask(Counter.where).result()
        assert (incarnation, net_of(pid) != place) == (2, True)
    assert [event["incarnation"] for event in events_of(tree, "child_spawned")] == [1, 2]


def test_a_stopped_agent_on_the_heads_own_host_is_replaced(tmp_path):
    spec = SupervisorSpec(id="root", backoff=QUICK, children=(counter_on(),))
    with Supervisor(spec, run_dir=tmp_path, lease=TERMS) as tree:
        old = psutil.Process(tree.pid("counter"))
        old.parent().suspend()
        eventually(lambda: not old.is_running())
        assert tree.ref("counter", Counter).within(20).ask(Counter.where).result()[1] == 2


def test_clocks_of_two_hosts_are_never_compared(network, tmp_path):
    """One host has been up for eleven days longer than the other."""
    skew = ("unshare", "--time", "--fork", "--kill-child", "--boottime", "1000000", "--monotonic", "1000000")
    if subprocess.run([*skew, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespaces here")
    hosts = [network.host("a", tmp_path, inside=skew), network.host("b", tmp_path)]
    relay = ChildSpec(id="relay", actor=Relay, hosts=("b",))
    with tree_on(network, tmp_path, hosts, counter_on("a"), relay) as tree:
        time.sleep(TERMS.patience_s + 1)  # several leases long
        assert tree.ref("relay", Relay).ask(Relay.add_via, "counter", 1).result() == 1
        assert tree.ref("counter", Counter).ask(Counter.where).result()[1] == 1
    assert not events_of(tree, "host_lost")


def test_a_peer_without_the_keys_of_the_run_gets_nothing(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a")) as tree:
        address = str(tree._courier.remote_address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(address)
            stranger.send(b"let me in")
            assert stranger.poll(500) == 0
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            heard = b""
            with suppress(ConnectionResetError):
                while block := plain.recv(4096):
                    heard += block
        assert b"relax" not in heard
        assert tree.ref("counter", Counter).ask(Counter.add, 1).result() == 1


def test_hosts_may_have_ipv6_addresses(network6, tmp_path):
    hosts = [network6.host("a", tmp_path), network6.host("b", tmp_path)]
    relay = ChildSpec(id="relay", actor=Relay, hosts=("b",))
    with tree_on(network6, tmp_path, hosts, counter_on("a"), relay) as tree:
        assert tree.ref("relay", Relay).ask(Relay.add_via, "counter", 1).result() == 1


def weights_of(version):
    return [(f"t{index}", np.full(200_000, version * 10 + index, np.int32)) for index in range(6)]


def test_policy_versions_reach_the_next_host_through_cut_links_and_nothing_of_them_is_left(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    config = Config(
        model=ModelConfig(path="unused"), data=DataConfig(path="unused"), dcs=DcsConfig(patience_s=1.0)
    )
    stores, run_id = app.stores(config, ["a", "b"]), secrets.token_hex(4)
    here, there = (ShmSpace(run_id, host.shm_root) for host in hosts)
    receiver = PolicyReceiver(there)
    with (
        tree_on(network, tmp_path, hosts, *stores, run_id=run_id) as tree,
        PolicyPublisher(here, bucket_bytes=1 << 20) as publisher,
    ):
        for version in range(4):
            publisher.publish(version, version, weights_of(version))
            if version == 2:
                network.cut("b")
                time.sleep(TERMS.ttl_s / 3)  # the length of the outage, below that of a lease
                network.heal("b")
            eventually(lambda version=version: receiver.latest() == version)
            with receiver.open() as snapshot:
                snapshot.verify()
                last = [int(array[-1]) for _, array in snapshot.arrays()]
            assert last == [version * 10 + i for i in range(6)]
        tree.ref("store-1", PolicyStore).ask(PolicyStore.status).result()
        os.kill(tree.pid("store-1"), signal.SIGKILL)
        publisher.publish(4, 4, weights_of(4))
        eventually(lambda: receiver.latest() == 4)
        assert len(there.names("dcs")) == len(here.names("dcs"))
    assert [event["version"] for event in events_of(tree, "policy_relayed")] == [0, 1, 2, 3, 4]
    assert here.names() == there.names() == []


HEAD = """
    import sys, time
    from pathlib import Path
    import msgspec
    from sample_actors import Counter
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec
    from relax_actor.supervision.hosts import Host

    if __name__ == "__main__":
        hosts = msgspec.json.decode(sys.argv[1], type=list[Host])
        children = ChildSpec(id="counter", actor=Counter, hosts=("a", "b"), replicas=2),
        spec = SupervisorSpec(id="root", children=children)
        with Supervisor(spec, run_dir=Path(sys.argv[2]), hosts=hosts, address=sys.argv[3]) as tree:
            print(tree.pid("counter/0"), tree.pid("counter/1"), flush=True)
            time.sleep(600)
"""


def test_a_killed_head_leaves_nothing_on_any_host(network, tmp_path):
    script = tmp_path / "head.py"
    script.write_text(textwrap.dedent(HEAD))
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    support = Path(__file__).parents[1] / "support"
    path = os.pathsep.join(filter(None, (str(support), os.environ.get("PYTHONPATH"))))
    arguments = [msgspec.json.encode(hosts).decode(), str(tmp_path / "run"), network.head]
    argv = [sys.executable, str(script), *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as head:
        actors = [psutil.Process(int(pid)) for pid in head.stdout.readline().split()]
        agents = [actor.parent() for actor in actors]
        family = [*actors, *agents, *(agent.parent() for agent in agents)]
        os.kill(head.pid, signal.SIGKILL)
    eventually(lambda: not any(process.is_running() for process in family))
