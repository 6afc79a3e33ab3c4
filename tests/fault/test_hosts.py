"""A tree over several hosts: network namespaces of this machine, with links that are cut and healed."""

import json
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
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from namespaces import make_network, tear_down
from sample_actors import Counter, Relay
from supervised_actors import Rank, Worker
from watching import QUICK, ended_at, events_of, eventually, is_dead

from relax_actor import ChildSpec, Supervisor, SupervisorSpec, cast
from relax_actor.actor.page import PageView
from relax_actor.config import Config, DataConfig, DcsConfig, ModelConfig
from relax_actor.dcs import PolicyPublisher, PolicyReceiver
from relax_actor.errors import ActorDied, GangAborted, StartFailed
from relax_actor.node.lease import LeaseTerms
from relax_actor.roles.store import PolicyStore
from relax_actor.supervision.hosts import Host
from transport.shm import ShmSpace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

TERMS = LeaseTerms(ttl_s=4.0, renew_s=0.4, margin_s=3.0)
"""Of leases that are to be over: each of the fences has time to act before the next one does."""

BRIEF = LeaseTerms(ttl_s=4.0, renew_s=0.4, margin_s=0.4)
"""Of leases that are not to be over."""

OUTAGE_S = 0.7
"""How long a link is cut that heals in time."""

# As ssh: killing it here leaves what it started running there, and its end says nothing.
LIKE_SSH = ("sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & exec 3<&- <&-; wait; exit 255', "sh")


# As a wrapper that says of itself what only a keeper may say: that nothing is left.
A_LIAR = ("sh", "-c", 'exec 3<&0; trap "exit 3" TERM; "$@" <&3 3<&- & exec 3<&- <&-; wait', "sh")


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
        **settings,
    )


def counter_on(*hosts, **fields):
    return ChildSpec(id="counter", actor=Counter, hosts=hosts, **fields)


def net_of(pid):
    return Path(f"/proc/{pid}/ns/net").readlink()


def in_method(tree, host, name, method):
    """Wait until the first incarnation of an actor runs a method."""
    space = ShmSpace(tree.run_id, host.shm_root)
    eventually(lambda: PageView.read(space, name, 1).method == method)


def sent_by(ref, name):
    """Return how many calls to an actor another one has sent that are not answered."""
    return ref.control.status().result()["calls"].get(name, {"in_flight": 0})["in_flight"]


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
        network, tmp_path, [network.host("a", tmp_path), late], counter_on("a"), join_timeout_s=15.0
    )
    expected = r'1 of 2 hosts joined; missing: late \(started, pid \d+, last log: "on my way"\)'
    with pytest.raises(StartFailed, match=expected), tree:
        pass


def test_an_agent_that_cannot_start_is_named_at_once(network, tmp_path):
    broken = Host(name="broken", prefix=("sh", "-c", "echo no such place; exit 3"), address=network.head)
    expected = r'missing: .*broken \(ended with exit code 3, last log: "no such place"\)'
    with (
        pytest.raises(StartFailed, match=expected),
        tree_on(network, tmp_path, [network.host("a", tmp_path), broken], counter_on("a")),
    ):
        pass


def test_behind_a_cut_link_actors_end_by_themselves_before_they_are_restarted_elsewhere(network, tmp_path):
    """No two incarnations at once: the fence acts before the head gives the host up."""
    hosts = [network.host("a", tmp_path, outside=LIKE_SSH), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a", "b"), lease=TERMS) as tree:
        counter = tree.ref("counter", Counter)
        child = psutil.Process(counter.ask(Counter.spawn_child).result())
        old, agent = psutil.Process(tree.pid("counter")), agent_of(tree, "counter")
        keeper, place = agent.parent(), net_of(old.pid)
        reply = counter.ask(Counter.sleep, 60.0)
        network.cut("a")
        gone_at = ended_at(old.pid)
        with pytest.raises(ActorDied, match="renewed no lease"):
            reply.result(20)
        eventually(lambda: not (keeper.is_running() or agent.is_running() or child.is_running()))
        pid, incarnation = counter.within(20).ask(Counter.where).result()
        assert incarnation == 2
        assert net_of(pid) != place
        assert len(events_of(tree, "host_lost")) == 1
        network.heal("a")
        eventually(lambda: len(events_of(tree, "host_joined")) == 3)
        assert counter.ask(Counter.where).result() == (pid, 2)
    spawned = [(event["incarnation"], event["m"] > gone_at) for event in events_of(tree, "child_spawned")]
    assert spawned == [(1, False), (2, True)]


def test_a_link_that_heals_in_time_costs_nobody_anything(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    relay = ChildSpec(id="relay", actor=Relay)
    with tree_on(network, tmp_path, hosts, counter_on("a"), relay, lease=BRIEF) as tree:
        network.cut("a")
        time.sleep(OUTAGE_S)  # not a wait for something
        network.heal("a")
        relay = tree.ref("relay", Relay)
        assert relay.within(20).ask(Relay.add_via, "counter", 1).result() == 1
        time.sleep(BRIEF.patience_s)  # a lease that was lost would be noticed by then
        assert tree.ref("counter", Counter).ask(Counter.where).result()[1] == 1
    assert not events_of(tree, "host_lost")


def test_what_was_said_while_a_connection_broke_arrives_all_the_same(network, tmp_path):
    """Orders to the agent, news to an actor: both were on a connection that is gone."""
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    relay = ChildSpec(id="relay", actor=Relay, hosts=("a",))
    lease = LeaseTerms(ttl_s=20.0, renew_s=0.3)  # a birth on "b" comes before the link heals
    with tree_on(network, tmp_path, hosts, counter_on("a"), relay, lease=lease) as tree:
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
    with tree_on(network, tmp_path, hosts, counter_on("a", "b"), lease=TERMS) as tree:
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


def test_an_old_incarnation_that_goes_on_beside_its_successor_is_heard_by_nobody(network, tmp_path):
    """It should be impossible, and takes a wrapper that lies; even then only the successor's word counts."""
    hosts = [network.host("a", tmp_path, outside=A_LIAR), network.host("b", tmp_path)]
    relay = ChildSpec(id="relay", actor=Relay, hosts=("b",))
    lease = LeaseTerms(ttl_s=30.0, renew_s=0.3)
    with tree_on(network, tmp_path, hosts, counter_on("a", "b"), relay, lease=lease) as tree:
        counter, via = tree.ref("counter", Counter).within(20), tree.ref("relay", Relay).within(20)
        assert via.ask(Relay.add_via, "counter", 100).result() == 100
        old, agent = psutil.Process(tree.pid("counter")), agent_of(tree, "counter")
        keeper = agent.parent()
        old.suspend()
        replies = [counter.ask(Counter.add, 1), via.ask(Relay.add_via, "counter", 1)]
        eventually(lambda: sent_by(via, "counter"))  # or it would find the successor
        agent.suspend()
        keeper.parent().terminate()
        for reply in replies:
            with pytest.raises(ActorDied, match="incarnation 1"):
                reply.result(20)
        assert counter.ask(Counter.where).result()[1] == 2
        old.resume()
        space = ShmSpace(tree.run_id, hosts[0].shm_root)
        eventually(lambda: (page := PageView.read(space, "counter", 1)).calls_begun == 3 and not page.method)
        eventually(lambda: "counter#1" in {event["peer"] for event in events_of(tree, "peer_refused")})
        assert counter.ask(Counter.add, 1).result() == 1
        assert via.ask(Relay.add_via, "counter", 1).result() == 2
        agent.resume()  # and finds that its head let it go
        eventually(lambda: is_dead(keeper) and is_dead(old))
        assert counter.ask(Counter.where).result()[1] == 2


def test_the_actors_of_a_stopped_agent_end_and_are_restarted_elsewhere_once(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a", "b"), lease=TERMS) as tree:
        old, place = psutil.Process(tree.pid("counter")), net_of(tree.pid("counter"))
        agent_of(tree, "counter").suspend()
        gone_at = ended_at(old.pid)
        pid, incarnation = tree.ref("counter", Counter).within(20).ask(Counter.where).result()
        assert (incarnation, net_of(pid) != place) == (2, True)
    spawned = [(event["incarnation"], event["m"] > gone_at) for event in events_of(tree, "child_spawned")]
    assert spawned == [(1, False), (2, True)]


def test_actors_end_by_themselves_where_agent_and_keeper_are_stopped(network, tmp_path):
    """Also one that is itself stopped, and one that holds its interpreter lock: the kernel has a timer."""
    hosts = [network.host("a", tmp_path, outside=LIKE_SSH), network.host("b", tmp_path)]
    kinds = {"counter": Counter, "stopped": Counter, "hog": Worker}
    children = [ChildSpec(id=name, actor=kind, hosts=("a", "b")) for name, kind in kinds.items()]
    with tree_on(network, tmp_path, hosts, *children, lease=TERMS) as tree:
        old = {name: psutil.Process(tree.pid(name)) for name in kinds}
        child = psutil.Process(tree.ref("counter", Counter).ask(Counter.spawn_child).result())
        tree.ref("hog", Worker).tell(Worker.hold_the_gil, 60)
        in_method(tree, hosts[0], "hog", "hold_the_gil")
        agent = agent_of(tree, "counter")
        keeper = agent.parent()
        old["stopped"].suspend()
        keeper.suspend()
        agent.suspend()
        gone_at = ended_at(*(each.pid for each in [*old.values(), agent, child]))
        for name, kind in kinds.items():
            method = Counter.where if kind is Counter else Worker.who
            assert tree.ref(name, kind).within(20).ask(method).result()[1] == 2
        again = [event for event in events_of(tree, "child_spawned") if event["incarnation"] == 2]
        assert min(event["m"] for event in again) > gone_at
        keeper.resume()
        eventually(lambda: is_dead(keeper))
    why = (tree.run_dir / "crash" / "counter-1.txt").read_text()
    assert "the lease of its node agent has been over" in why
    assert "agent and keeper are stopped" in why
    assert "most recent call first" in (tree.run_dir / "logs" / "counter-1.log").read_text()
    eventually(lambda: (tree.run_dir / "crash" / "counter-1" / "traceback.txt").read_text() == why)
    assert [event["actor"] for event in events_of(tree, "actor_fenced")] == ["counter"]


def test_actors_of_the_heads_own_host_end_by_themselves_too(tmp_path):
    spec = SupervisorSpec(id="root", backoff=QUICK, children=(counter_on(),))
    with Supervisor(spec, run_dir=tmp_path, lease=TERMS) as tree:
        old, agent = psutil.Process(tree.pid("counter")), agent_of(tree, "counter")
        agent.parent().suspend()
        agent.suspend()
        eventually(lambda: is_dead(old))
        assert tree.ref("counter", Counter).within(20).ask(Counter.where).result()[1] == 2
    assert "agent and keeper are stopped" in (tmp_path / "crash" / "counter-1.txt").read_text()


def test_whoever_cannot_look_at_the_lease_for_long_is_not_ended_for_it(tmp_path):
    """One is stopped for longer than the lease, one holds its interpreter lock, one has much to do."""
    lock, much = (ChildSpec(id=name, actor=Worker) for name in ("lock", "much"))
    spec = SupervisorSpec(id="root", backoff=QUICK, children=(counter_on(), lock, much))
    with Supervisor(spec, run_dir=tmp_path, lease=BRIEF) as tree:
        counter = psutil.Process(tree.pid("counter"))
        replies = [
            tree.ref("lock", Worker).ask(Worker.hold_the_gil, 6),
            tree.ref("much", Worker).ask(Worker.spin, 6.0),
        ]
        counter.suspend()
        assert [reply.result() for reply in replies] == ["done", "done"]
        counter.resume()
        assert tree.ref("counter", Counter).ask(Counter.where).result()[1] == 1
    assert not events_of(tree, "actor_fenced")
    assert len(events_of(tree, "child_spawned")) == 3


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
    with tree_on(network, tmp_path, hosts, counter_on("a"), relay, lease=BRIEF) as tree:
        time.sleep(BRIEF.patience_s + 1)  # longer than any lease
        assert tree.ref("relay", Relay).ask(Relay.add_via, "counter", 1).result() == 1
        assert tree.ref("counter", Counter).ask(Counter.where).result()[1] == 1
    assert not events_of(tree, "host_lost")


def test_a_peer_without_the_keys_of_the_run_gets_nothing(network, tmp_path):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a")) as tree:
        address = str(tree._head.courier.remote_address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(address)
            stranger.send(b"let me in")
            assert stranger.poll(500) == 0
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as plain:
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


@pytest.mark.parametrize("lost", [0, 1])
def test_a_gang_over_two_hosts_meets_again_when_one_rank_is_killed(network, tmp_path, lost):
    """The ranks meet at rank 0's own address, whichever of them is lost."""
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    ranks = ChildSpec(
        id="rank",
        actor=Rank,
        replicas=2,
        gang=True,
        zygote="torch",
        hosts=("a", "b"),
        env=env,
        abort_grace_s=60.0,
    )
    zygotes = {"default": (), "torch": ("torch",)}
    with tree_on(network, tmp_path, hosts, ranks, zygotes=zygotes) as tree:
        refs = [tree.ref(f"rank/{rank}", Rank).within(60) for rank in range(2)]
        assert [reply.result() for reply in [ref.ask(Rank.sum_of_ranks) for ref in refs]] == [3, 3]
        nets = [net_of(tree.pid(f"rank/{rank}")) for rank in range(2)]
        before = refs[1].ask(Rank.rendezvous).result()
        assert before.startswith(f"tcp://{hosts[0].address}:")
        replies = [ref.ask(Rank.sum_for_ever) for ref in refs]
        for rank, host in enumerate(hosts):
            in_method(tree, host, f"rank/{rank}", "sum_for_ever")
        os.kill(tree.pid(f"rank/{lost}"), signal.SIGKILL)
        with pytest.raises(ActorDied):
            replies[lost].result(20)
        with pytest.raises(GangAborted):
            replies[1 - lost].result(20)
        assert [reply.result() for reply in [ref.ask(Rank.sum_of_ranks) for ref in refs]] == [3, 3]
        assert refs[1].ask(Rank.rendezvous).result() != before
        assert [net_of(tree.pid(f"rank/{rank}")) for rank in range(2)] == nets
    assert [event["epoch"] for event in events_of(tree, "gang_formed")] == [1, 2]


def relax(tree, *arguments):
    command = [sys.executable, "-m", "relax_actor", arguments[0], str(tree.run_dir), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_actors_of_other_hosts_are_looked_into_through_their_agents(network, tmp_path):
    """Host a has a name of its own, memory that nobody else knows of, and a run folder of its own."""
    other = ("unshare", "--uts", "sh", "-c", 'hostname faraway; exec "$@"', "sh")
    far = network.host("a", tmp_path, inside=other)
    far = msgspec.structs.replace(far, run_dir=str(tmp_path / "run-of-a"))
    lock, busy = (ChildSpec(id=name, actor=Worker, hosts=("a",)) for name in ("lock", "busy"))
    near = ChildSpec(id="near", actor=Counter, hosts=("b",))
    with tree_on(network, tmp_path, [far, network.host("b", tmp_path)], lock, busy, near) as tree:
        tree.ref("lock", Worker).tell(Worker.hold_the_gil, 60)
        tree.ref("busy", Worker).tell(Worker.work, 60.0, report=True)
        in_method(tree, far, "lock", "hold_the_gil")
        in_method(tree, far, "busy", "work")
        memory = ShmSpace(tree.run_id, far.shm_root)
        eventually(lambda: PageView.read(memory, "busy", 1).progress)
        rows = {row["actor"]: row for row in json.loads(relax(tree, "ps", "--json").stdout)}
        assert [rows[name]["host"] for name in ("lock", "busy")] == ["faraway"] * 2
        assert (rows["lock"]["pid"], rows["lock"]["method"]) == (tree.pid("lock"), "hold_the_gil")
        assert rows["busy"]["progress"] == "still at it"
        assert rows["lock"]["rss_bytes"] > 2**20
        assert rows["near"]["pid"] == tree.pid("near")

        stack = relax(tree, "stack", "lock")
        assert "in hold_the_gil" in stack.stdout, stack.stderr
        psutil.Process(tree.pid("busy")).suspend()
        stopped = relax(tree, "stack", "busy")
        assert "is stopped by a signal" in stopped.stderr
        assert '"state":"stopped"' in relax(tree, "ps", "--json").stdout

        os.kill(
            tree.pid("busy"), signal.SIGABRT
        )  # SIGKILL might be for want of memory, if anybody has that now
        os.kill(tree.pid("busy"), signal.SIGCONT)
        eventually(
            lambda: len([each for each in events_of(tree, "child_spawned") if each["child"] == "busy"]) == 2
        )
        why = json.loads(relax(tree, "why", "busy#1", "--json").stdout)
        assert (why["exit"], why["method"]) == ("signal", "work")
        assert why["log"] == str(tmp_path / "run-of-a" / "logs" / "busy-1.log")


def test_without_the_head_there_is_nothing_to_see_of_other_hosts_and_it_is_said(network, tmp_path):
    other = ("unshare", "--uts", "sh", "-c", 'hostname faraway; exec "$@"', "sh")
    hosts = [network.host("a", tmp_path, inside=other), network.host("b", tmp_path)]
    with tree_on(network, tmp_path, hosts, counter_on("a")) as tree:
        log = (tree.run_dir / "events.jsonl").read_text()
        copy = tmp_path / "copy"
        shutil.copytree(tree.run_dir, copy, ignore=shutil.ignore_patterns("*.lock"))
        address = events_of(tree, "tree_started")[0]["address"]
        (copy / "events.jsonl").write_text(log.replace(address, f"ipc://{tmp_path}/nobody"))
        command = [sys.executable, "-m", "relax_actor", "stack", str(copy), "counter"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "`counter#1` runs on faraway, out of sight" in done.stderr
    assert "run this command on faraway" in done.stderr


def weights_of(version):
    return [(f"t{index}", np.full(200_000, version * 10 + index, np.int32)) for index in range(6)]


@pytest.mark.parametrize("relay", ["chain", "group"])
def test_policy_versions_reach_the_next_host_through_cut_links_and_nothing_of_them_is_left(
    network, tmp_path, relay
):
    hosts = [network.host("a", tmp_path), network.host("b", tmp_path)]
    dcs = DcsConfig(patience_s=1.0, relay=relay)
    config = Config(model=ModelConfig(path="unused"), data=DataConfig(path="unused"), dcs=dcs)
    zygotes = {"default": (), "torch": ("torch.distributed",)}
    stores, run_id = cast.stores(config, ["a", "b"]), secrets.token_hex(4)
    here, there = (ShmSpace(run_id, host.shm_root) for host in hosts)
    receiver = PolicyReceiver(there)
    with (
        tree_on(network, tmp_path, hosts, *stores, run_id=run_id, zygotes=zygotes) as tree,
        PolicyPublisher(here, bucket_bytes=1 << 20) as publisher,
    ):
        for version in range(4):
            if relay == "group" and version != 2:  # before the outage, and well after it
                store = tree.ref("store-1", PolicyStore)
                eventually(lambda store=store: store.ask(PolicyStore.status).result().group_epoch, 60.0)
            publisher.publish(version, version, weights_of(version))
            if version == 2:
                network.cut("b")
                time.sleep(OUTAGE_S)
                network.heal("b")
            eventually(lambda version=version: receiver.latest() == version)
            with receiver.open() as snapshot:
                snapshot.verify()
                last = [int(array[-1]) for _, array in snapshot.arrays()]
            assert last == [version * 10 + i for i in range(6)]
        eventually(lambda: len(events_of(tree, "policy_relayed")) == 4)  # it says so after it has it
        os.kill(tree.pid("store-1"), signal.SIGKILL)
        publisher.publish(4, 4, weights_of(4))
        eventually(lambda: receiver.latest() == 4)
        eventually(lambda: len(events_of(tree, "policy_relayed")) == 5)
        eventually(
            lambda: len(there.names("dcs")) == len(here.names("dcs"))
        )  # what is retired goes after that
    relayed = events_of(tree, "policy_relayed")
    assert [event["version"] for event in relayed] == [0, 1, 2, 3, 4]
    assert relay in {event["relay"] for event in relayed}
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
