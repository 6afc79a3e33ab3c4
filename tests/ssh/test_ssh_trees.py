"""A tree over hosts that are reached through a real sshd."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
from sample_actors import Counter, Relay
from ssh_actors import Writer
from ssh_hosts import await_nothing, family_of, is_there
from watching import QUICK, events_of, eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.errors import ActorDied

pytestmark = pytest.mark.timeout(240)

NASTY = {
    "SPACE": "a b  c",
    "DOUBLE": 'say "hi"',
    "SINGLE": "it's",
    "HOMELESS": "$HOME ${PATH}",
    "TICKS": "`id`",
    "SEMICOLON": "a; exit 3 & b | c",
    "LINES": "one\ntwo\n",
    "OBJECT": '{"a":1}',
    "PERCENT": "100 %s %%",
    "EMOJI": "🦀 é",
    "EMPTY": "",
}


def tree_on(reached, tmp_path, *children):
    return Supervisor(
        SupervisorSpec(id="root", backoff=QUICK, children=children),
        run_dir=tmp_path / "run",
        hosts=reached.hosts,
        address=reached.address,
    )


def counters_on(reached, replicas=None):
    names = tuple(host.name for host in reached.hosts)
    return ChildSpec(id="counter", actor=Counter, hosts=names, replicas=replicas or len(names))


def environment_of(pid):
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.split(b"=", 1) for pair in pairs if pair)


def test_a_tree_over_two_hosts_leaves_its_history_on_the_head_and_nothing_else(pair, reach, tmp_path):
    reached = reach(*pair)
    far = reached.hosts[1].name
    others = [
        ChildSpec(id=name, actor=kind, hosts=(far,)) for name, kind in (("relay", Relay), ("w", Writer))
    ]
    with tree_on(reached, tmp_path, counters_on(reached), *others) as tree:
        for index in range(2):
            assert tree.ref("relay", Relay).ask(Relay.add_via, f"counter/{index}", 2).result() == 2
        tree.ref("w", Writer).ask(Writer.say, "from afar").result()
        servers_of = [psutil.Process(tree.pid(f"counter/{index}")).parents() for index in range(2)]
        for parents, server in zip(servers_of, pair, strict=True):
            assert server.process.pid in {parent.pid for parent in parents}
        family = [each for server in pair for each in server.sessions]
    await_nothing(tree.run_id, family)
    assert "from afar" in (tmp_path / "run" / "logs" / "w-1.log").read_text()
    agents = {event["pid"] for event in events_of(tree, "process_exited")}
    assert len(agents) == 2
    ended = [event["site"] for event in events_of(tree, "lease_ended")]
    assert sorted(ended) == sorted(host.name for host in reached.hosts)


def test_an_environment_arrives_byte_for_byte_and_nobody_sees_it_on_the_way(pair, reach, tmp_path):
    reached = reach(pair[0], env=tuple(NASTY.items()))
    with tree_on(reached, tmp_path, ChildSpec(id="w", actor=Writer)) as tree:
        found = environment_of(tree.pid("w"))
        assert {name: found[name.encode()].decode() for name in NASTY} == NASTY
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in psutil.pids() if psutil.pid_exists(pid)]
        secrets = [value.encode() for value in NASTY.values() if len(value) > 6]
        assert not [line for line in lines for secret in secrets if secret in line]
        assert tree.ref("w", Writer).ask(Writer.surroundings).result()[0] == str(tmp_path)


def test_collectives_use_the_interface_that_leads_to_the_head_and_no_proxy_is_in_between(
    pair, reach, tmp_path
):
    reached = reach(*pair, env=(("no_proxy", "mine.example"), ("GLOO_SOCKET_IFNAME", "eth9")))
    with tree_on(reached, tmp_path, ChildSpec(id="w", actor=Writer)) as tree:
        env = tree.ref("w", Writer).ask(Writer.surroundings).result()[1]
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("lo", "eth9")
    assert set(env["no_proxy"].split(",")) >= {"mine.example", *(server.address for server in pair)}
    assert env["NO_PROXY"] == env["no_proxy"]


SETUP = """
cat  # reads nothing, and takes nothing away
cd /
export FROM_SETUP="$SEEN_BY_SETUP and more"
echo "what it prints goes to the agent's log"
"""


def test_a_setup_script_has_the_last_word(pair, reach, tmp_path):
    reached = reach(pair[0], setup=SETUP, env=(("SEEN_BY_SETUP", "$1 `x`"),))
    with tree_on(reached, tmp_path, ChildSpec(id="w", actor=Writer)) as tree:
        folder, env = tree.ref("w", Writer).ask(Writer.surroundings).result()
    assert (folder, env["FROM_SETUP"]) == ("/", "$1 `x` and more")
    assert "what it prints" in (tmp_path / "run" / "logs" / f"agent-{reached.hosts[0].name}.log").read_text()


NOISY = 'echo "Welcome!"; printf "no line end"; head -c 100000 /dev/zero; eval "$SSH_ORIGINAL_COMMAND"'


def test_what_a_login_shell_prints_is_no_obstacle(servers, reach, tmp_path):
    server = servers.start(f"ForceCommand {NOISY}")
    reached = reach(server)
    with tree_on(reached, tmp_path, counters_on(reached)) as tree:
        assert tree.ref("counter", Counter).ask(Counter.add, 1).result() == 1
    assert "Welcome!" in (tmp_path / "run" / "logs" / f"agent-{reached.hosts[0].name}.log").read_text()


def test_a_server_that_takes_few_sessions_at_once_is_asked_again(servers, reach, tmp_path):
    server = servers.start("MaxStartups 1", address="0.0.0.0")  # noqa: S104 - each host has an address of it
    addresses = [f"127.0.1.{number}" for number in range(1, 7)]
    key = servers.known_hosts.read_text().split()[-1]
    with servers.known_hosts.open("a") as known:
        known.writelines(f"[{address}]:{server.port} ssh-ed25519 {key}\n" for address in addresses)
    entries = [msgspec.structs.replace(servers.entry(server), name=address) for address in addresses]
    reached = reach(entries=entries)
    with tree_on(reached, tmp_path, counters_on(reached)) as tree:
        assert len(events_of(tree, "host_joined")) == len(entries)
    refused = events_of(tree, "host_not_reached")
    assert refused
    assert not [event for event in refused if event["answered"]]


def test_no_event_is_lost_and_a_log_that_is_far_behind_is_cut_in_its_middle(pair, reach, tmp_path):
    reached = reach(pair[0])
    with tree_on(reached, tmp_path, ChildSpec(id="w", actor=Writer)) as tree:
        writer = tree.ref("w", Writer).within(60)
        writer.ask(Writer.say, "the first line").result()
        writer.ask(Writer.tell, 5000).result()
        handed_over = tmp_path / "run" / "logs" / "w-1.log"
        eventually(lambda: handed_over.exists() and "the first line" in handed_over.read_text())
        porter = next(each for each in pair[0].sessions if "--stdin-frame" in each.cmdline())
        porter.suspend()  # as a link that is too slow
        writer.ask(Writer.fill, 20_000_000).result()
        porter.resume()
        writer.ask(Writer.say, "the last line").result()
    assert [event["number"] for event in events_of(tree, "told")] == list(range(5000))
    log = (tmp_path / "run" / "logs" / "w-1.log").read_text()
    assert log.startswith("the first line")
    assert "the last line" in log[-10_000:]
    assert "bytes were not handed over: they are in" in log
    assert len(log) < 8_000_000


def test_how_an_actor_died_is_told_on_the_head_with_its_last_words(pair, reach, tmp_path):
    reached = reach(pair[0])
    with tree_on(reached, tmp_path, ChildSpec(id="w", actor=Writer)) as tree:
        with pytest.raises(ActorDied):
            tree.ref("w", Writer).ask(Writer.die_saying, "so this is it").result()
        eventually(lambda: tree.pid("w") and events_of(tree, "child_exited"))
        [event] = [each for each in events_of(tree, "child_exited") if each["incarnation"] == 1]
    assert 'last log: "so this is it"' in event["line"]
    assert "s into die_saying (call" in event["line"]
    assert event["line"].endswith(f"log: {tmp_path / 'run' / 'logs' / 'w-1.log'}")
    crash = tmp_path / "run" / "crash" / "w-1"
    assert "so this is it" in (crash / "log.txt").read_text()
    assert "die_saying" in (crash / "page.json").read_text()


def agent_of(tree, name):
    return psutil.Process(tree.pid(name)).parent()


@pytest.mark.parametrize("victim", ["ssh", "porter", "keeper", "agent"])
def test_whoever_is_killed_of_those_between_head_and_actor_all_below_go_and_the_host_joins_again(
    pair, reach, tmp_path, victim
):
    reached = reach(pair[0])
    with tree_on(reached, tmp_path, counters_on(reached)) as tree:
        agent = agent_of(tree, "counter")
        child = psutil.Process(tree.ref("counter", Counter).ask(Counter.spawn_child).result())
        keeper, porter = agent.parent(), agent.parent().parent()
        below = [porter, *porter.children(recursive=True)]
        assert child in below
        [ssh] = [each for each in psutil.Process().children() if each.name() == "ssh"]
        {"ssh": ssh, "porter": porter, "keeper": keeper, "agent": agent}[victim].kill()
        eventually(lambda: not any(map(is_there, below)), 60)
        assert tree.ref("counter", Counter).within(120).ask(Counter.where).result()[1] >= 2
        family = family_of(psutil.Process(pair[0].process.pid))[1:]
    await_nothing(tree.run_id, family)
    assert [event["agent"] for event in events_of(tree, "host_joined")] == [1, 2]
    told = [event["incarnation"] for event in events_of(tree, "process_exited")]
    assert len(told) == len(set(told))


def test_a_hung_session_costs_nothing_while_the_hosts_hear_one_another_and_ends_with_the_run(
    servers, reach, tmp_path
):
    server = servers.start()
    reached = reach(server)
    with tree_on(reached, tmp_path, counters_on(reached)) as tree:
        agent = agent_of(tree, "counter")
        ours = [agent.parent().parent(), *agent.parent().parent().children(recursive=True)]
        hung = [each for each in server.sessions if each.name().startswith("sshd")]
        for process in hung:
            process.suspend()
        assert tree.ref("counter", Counter).ask(Counter.add, 2).result() == 2
        [ssh] = [each for each in psutil.Process().children() if each.name() == "ssh"]
        ssh.kill()  # as it does itself after 15 s without an answer
    try:
        await_nothing(tree.run_id, ours)
    finally:
        for process in hung:
            process.kill()


HEAD = """
    import sys, time
    from pathlib import Path
    import msgspec
    from sample_actors import Counter
    from relax_actor import ChildSpec, Supervisor, SupervisorSpec
    from relax_actor.supervision.hosts import Host

    if __name__ == "__main__":
        hosts = msgspec.json.decode(sys.argv[1], type=list[Host])
        names = tuple(host.name for host in hosts)
        children = ChildSpec(id="counter", actor=Counter, hosts=names, replicas=2),
        spec = SupervisorSpec(id="root", children=children)
        with Supervisor(spec, run_dir=Path(sys.argv[2]), hosts=hosts, address=sys.argv[3]) as tree:
            print(tree.run_id, flush=True)
            time.sleep(600)
"""


def test_a_killed_head_leaves_nothing_on_any_host(pair, reach, tmp_path):
    reached = reach(*pair)
    script = tmp_path / "head.py"
    script.write_text(textwrap.dedent(HEAD))
    support = Path(__file__).parents[1] / "support"
    path = os.pathsep.join(filter(None, (str(support), os.environ.get("PYTHONPATH"))))
    arguments = [msgspec.json.encode(reached.hosts).decode(), str(tmp_path / "run"), reached.address]
    argv = [sys.executable, str(script), *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as head:
        run_id = head.stdout.readline().decode().strip()
        family = [each for server in pair for each in server.sessions]
        assert len(family) > 8
        os.kill(head.pid, signal.SIGKILL)
    await_nothing(run_id, family)


def test_hosts_in_networks_of_their_own_are_reached_by_their_routes(servers, reach, tmp_path, network):
    entries = []
    for name in "ab":
        address = network.address(name)
        server = servers.start(address=address, inside=network.inside(name))
        entries.append(servers.entry(server))
    reached = reach(entries=entries)
    assert reached.address == network.head
    children = ChildSpec(id="w", actor=Writer, replicas=2, hosts=tuple(host.name for host in reached.hosts))
    relay = ChildSpec(id="relay", actor=Relay, hosts=(reached.hosts[0].name,))
    counter = ChildSpec(id="counter", actor=Counter, hosts=(reached.hosts[1].name,))
    with tree_on(reached, tmp_path, children, relay, counter) as tree:
        assert tree.ref("relay", Relay).ask(Relay.add_via, "counter", 1).result() == 1
        for index in range(2):
            env = tree.ref(f"w/{index}", Writer).ask(Writer.surroundings).result()[1]
            assert env["NCCL_SOCKET_IFNAME"] == "eth0"
        family = [each for server in servers.running[-2:] for each in server.sessions]
    await_nothing(tree.run_id, family)
