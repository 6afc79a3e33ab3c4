"""Several runs on one host, where only some ports are allowed and others are taken."""

import secrets
import socket
from contextlib import ExitStack, suppress

from sample_actors import Counter
from watching import QUICK

from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.supervision.hosts import Host
from transport.ports import VARIABLE

RUNS = 8
PORTS = 60
ADDRESS = "127.0.0.1"


def tree_in(folder):
    """Return a tree that listens at two ports: the head's, and its actor's on the host beside it."""
    spec = SupervisorSpec(id="root", backoff=QUICK, children=(ChildSpec(id="counter", actor=Counter),))
    hosts = [Host(name="far", prefix=("env",), address=ADDRESS)]
    return Supervisor(spec, run_dir=folder, hosts=hosts, address=ADDRESS)


def test_eight_runs_at_once_share_a_range_of_ports_of_which_every_second_is_taken(tmp_path, monkeypatch):
    first = 20_000 + secrets.randbelow(10_000)
    monkeypatch.setenv(VARIABLE, f"{first}-{first + PORTS - 1}")
    with ExitStack() as stack:
        for port in range(first, first + PORTS, 2):
            with suppress(OSError):  # somebody else's: taken all the same
                stack.enter_context(socket.create_server((ADDRESS, port)))
        trees = [tree_in(tmp_path / f"{number}").start() for number in range(RUNS)]
        for tree in trees:
            stack.callback(tree.close)
        for tree in trees:
            tree.wait_ready(60)
        heads = {tree._head.courier.remote_address.port for tree in trees}
        assert [tree.ref("counter", Counter).ask(Counter.add, 1).result() for tree in trees] == [1] * RUNS
        assert len(heads) == RUNS
        assert all(first < port < first + PORTS and (port - first) % 2 for port in heads)
