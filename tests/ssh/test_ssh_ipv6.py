"""Hosts with IPv6 addresses, from the hostfile to the actors' streams and collectives."""

import os
import secrets
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest
from sample_actors import Counter
from ssh_hosts import await_nothing, own_shm
from ssh_launch import listening
from watching import QUICK, eventually

from relax_actor import ChildSpec, Supervisor, SupervisorSpec

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def lonely():
    """Return the command that runs another one in a network of its own, with these addresses alone."""
    name = f"rx{secrets.token_hex(3)}"
    inside = ("ip", "netns", "exec", name)
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True, capture_output=True)
        for address in ("fd00::1", "fd00::2", "fe80::1", "fe80::2"):
            add = [*inside, "ip", "addr", "add", f"{address}/64", "dev", "lo", "nodad"]
            subprocess.run(add, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces with IPv6 here: {error}")
    else:
        yield inside
    finally:
        with suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize(
    ("addresses", "relay"),
    [(("fd00::1", "fd00::2"), "group"), (("fe80::1%lo", "fe80::2%lo"), "chain")],
    ids=["private addresses, a gloo group", "link-local addresses, streams"],
)
def test_a_run_speaks_ipv6_alone(start, servers, lonely, addresses, relay):
    hosts = [servers.start(address=address, inside=lonely, before=own_shm()) for address in addresses]
    launched = start(hosts, inside=lonely, steps=5000, dcs={"relay": relay})

    def is_installed_everywhere():
        assert launched.process.poll() is None, launched.output()
        new = {event["actor"] for event in launched.events("policy_installed") if event["version"] > 1}
        return new == {"rollout/0", "rollout/1"}

    eventually(is_installed_everywhere, 100)
    family = launched.family(hosts)
    assert {host for host, _ in listening(family)} == {each.partition("%")[0] for each in addresses}
    os.kill(launched.process.pid, signal.SIGINT)
    assert launched.ended() == 130, launched.output()
    await_nothing(launched.run_id, family)


def test_a_head_may_be_at_the_loopback_address(servers, reach, tmp_path):
    reached = reach(servers.start(address="::1"), master_addr="::1")
    assert (reached.hosts[0].address, reached.address) == ("::1", "::1")
    counter = ChildSpec(id="counter", actor=Counter)
    spec = SupervisorSpec(id="root", backoff=QUICK, children=(counter,))
    with Supervisor(spec, run_dir=tmp_path / "run", hosts=reached.hosts, address=reached.address) as tree:
        assert tree.ref("counter", Counter).ask(Counter.add, 1).result() == 1
        assert psutil.Process(tree.pid("counter")).environ()["GLOO_SOCKET_IFNAME"] == "lo"
