"""Several runs on one host, where only some ports are allowed and others are taken."""

import secrets
import socket
from contextlib import ExitStack, suppress

from sample_actors import Counter
from watching import QUICK, eventually

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


def first_of_range(stack):
    """Take every second port of a range for as long as `stack` lasts; none if one is somebody else's."""
    first = 20_000 + secrets.randbelow(10_000)
    with ExitStack() as taken, suppress(OSError):
        for port in range(first, first + PORTS, 2):
            taken.enter_context(socket.create_server((ADDRESS, port)))
        stack.enter_context(taken.pop_all())
        return first
    return None


def test_eight_runs_at_once_share_a_range_of_ports_of_which_every_second_is_taken(tmp_path, monkeypatch):
    with ExitStack() as stack:
        first = eventually(lambda: first_of_range(stack))
        monkeypatch.setenv(VARIABLE, f"{first}-{first + PORTS - 1}")
        trees = [tree_in(tmp_path / f"{number}").start() for number in range(RUNS)]
        for tree in trees:
            stack.callback(tree.close)
        for tree in trees:
            tree.wait_ready(100)
        heads = {tree._head.courier.remote_address.port for tree in trees}
        assert [tree.ref("counter", Counter).ask(Counter.add, 1).result() for tree in trees] == [1] * RUNS
        assert len(heads) == RUNS
        assert all(first < port < first + PORTS and (port - first) % 2 for port in heads)
