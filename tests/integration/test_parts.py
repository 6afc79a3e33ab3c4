"""A part of a replica: it has one server in its life, for one incarnation of its rollout."""

import socket

import fake_sglang
import psutil
import pytest
from loop_run import loop_config

from relax_actor.roles.part import Part
from relax_actor.supervision.monitor import Phase
from relax_actor.supervision.spec import Backoff, ChildSpec, SupervisorSpec
from relax_actor.supervision.supervisor import Supervisor
from relax_actor.telemetry import read_events

DEADLINE_S = 30.0


@pytest.fixture
def meeting():
    """A place where nobody is met: a server that has started goes on looking for the first node."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def tree(tmp_path, tiny_model):
    rollout = {
        "engine": "sglang",
        "tensor_parallel": 2,
        "hosts_per_replica": 2,
        "sglang_python": str(fake_sglang.stand_in(tmp_path)),
    }
    config = loop_config(tiny_model, rollout=rollout)
    part = ChildSpec(id="part", actor=Part, args={"config": config}, always_indexed=True)
    spec = SupervisorSpec(id="root", backoff=Backoff(base_s=0.01, cap_s=0.05), children=(part,))
    with Supervisor(spec, run_dir=tmp_path / "run") as tree:
        yield tree


@pytest.fixture
def part(tree):
    return tree.ref("part/0", Part).within(DEADLINE_S)


def servers(tree):
    """Return the pids of all servers that were started, in order."""
    events, _ = read_events(tree.run_dir / "events.jsonl")
    return [event["server_pid"] for event in events if event["kind"] == "part_started"]


def await_gone(monitor):
    """Return how the incarnation ended that ran."""
    while (seen := monitor.next(DEADLINE_S)) is not None:
        if seen.phase is Phase.GONE:
            return str(seen.exit)
    raise AssertionError("it goes on")


def test_a_call_that_is_sent_again_starts_nothing_again(tree, part, meeting):
    begun = [part.ask(Part.start, 1, meeting).result() for _ in range(2)]
    assert begun[0] == begun[1]
    assert begun[0].incarnation == 1
    assert len(servers(tree)) == 1


@pytest.mark.parametrize("asked", [2, 1])
def test_another_incarnation_of_the_rollout_is_served_by_the_next_of_the_part(tree, part, meeting, asked):
    """Whoever asks second, the newer or a late older one: nobody meets what is left of another server."""
    part.ask(Part.start, 3 - asked, meeting).result()
    monitor = tree.monitor("part/0")
    assert part.ask(Part.start, asked, meeting).result() is None
    await_gone(monitor)
    assert part.ask(Part.start, asked, meeting).result().incarnation == 2
    first, second = servers(tree)
    assert not psutil.pid_exists(first)
    assert psutil.pid_exists(second)


def test_only_the_incarnation_that_it_serves_for_ends_its_server(tree, part, meeting):
    part.ask(Part.start, 1, meeting).result()
    (server,) = servers(tree)
    part.ask(Part.end, 2).result()
    assert psutil.pid_exists(server)
    part.ask(Part.end, 1).result()
    assert not psutil.pid_exists(server)
    assert tree.ref("part/0", Part).incarnation == 1, "an end that was asked for is no failure"


def test_a_server_that_dies_before_all_have_met_ends_the_part_with_its_last_word(tree, part, meeting):
    part.ask(Part.start, 1, meeting).result()
    monitor = tree.monitor("part/0")
    (server,) = servers(tree)
    psutil.Process(server).kill()
    assert "SGLang's node 1 ended with SIGKILL" in await_gone(monitor)
