"""A tree over hosts that are reached through a real sshd."""

from pathlib import Path

import psutil
import pytest
from sample_actors import Counter, Relay
from ssh_actors import Writer
from ssh_hosts import await_nothing
from watching import QUICK, events_of

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.node.lease import LeaseTerms

pytestmark = pytest.mark.timeout(90)

TERMS = LeaseTerms(ttl_s=2.0, renew_s=0.3, margin_s=0.3)

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


def tree_on(reached, tmp_path, *children, **settings):
    return Supervisor(
        SupervisorSpec(id="root", backoff=QUICK, children=children),
        run_dir=tmp_path / "run",
        hosts=reached.hosts,
        address=reached.address,
        **{"lease": TERMS, **settings},
    )


def counters_on(reached, replicas=None):
    names = tuple(host.name for host in reached.hosts)
    return ChildSpec(id="counter", actor=Counter, hosts=names, replicas=replicas or len(names))


def environment_of(pid):
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.split(b"=", 1) for pair in pairs if pair)


def porters_of(server):
    return [each for each in server.sessions if "--stdin-frame" in each.cmdline()]


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
    assert sorted(event["site"] for event in events_of(tree, "lease_ended")) == [
        h.name for h in reached.hosts
    ]
