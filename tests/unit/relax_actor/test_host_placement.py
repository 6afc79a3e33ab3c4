"""Hosts as data: what is refused before anything starts, and which host a replica gets."""

import sys

import pytest

from relax_actor.supervision.hosts import LOCAL, Host, check_hosts, check_placement, choose
from relax_actor.supervision.spec import ChildSpec, SpecError, SupervisorSpec

A = Host(name="a", prefix=("ssh", "a", "--", "exec"), address="10.0.0.1")


def test_one_host_needs_no_address():
    check_hosts([LOCAL], "")
    assert LOCAL.interpreter == sys.executable
    assert Host(name="a", python="/opt/python").interpreter == "/opt/python"


def test_hosts_with_addresses_are_taken():
    check_hosts([A, Host(name="here", address="fd00::1")], "head.cluster")


@pytest.mark.parametrize(
    ("hosts", "address", "where"),
    [
        ([Host(name="no spaces")], "", r"hosts\[0\].name"),
        ([A, Host(name="a", address="10.0.0.2")], "10.0.0.9", r"hosts\[0\].name"),
        ([A, Host(name="b")], "10.0.0.9", r"hosts\[1\].address"),
        ([Host(name="b", prefix=("ssh",))], "10.0.0.9", r"hosts\[0\].address"),
        ([Host(name="b", prefix=("ssh",), address="1.2.3")], "10.0.0.9", r"hosts\[0\].address"),
        ([A], "", "address"),
    ],
)
def test_a_host_that_cannot_work_is_refused_by_field(hosts, address, where):
    with pytest.raises(SpecError, match=where):
        check_hosts(hosts, address)


def test_a_child_on_a_host_that_is_not_there_is_refused():
    child = ChildSpec(id="counter", actor="m:Counter", hosts=("a", "c"))
    check_placement(SupervisorSpec(id="root", children=(child,)), {"a", "c"})
    with pytest.raises(SpecError, match=r"counter\.hosts.*names 'c'; there are a, b"):
        check_placement(SupervisorSpec(id="root", children=(child,)), {"a", "b"})


def test_replicas_take_the_hosts_in_turn():
    chosen = [choose(("a", "b", "c"), replica, {"a", "b", "c"}) for replica in range(5)]
    assert chosen == ["a", "b", "c", "a", "b"]


def test_a_host_that_is_lost_is_passed_over_and_waited_for_only_if_all_are():
    assert choose(("a", "b", "c"), 1, {"a", "c"}) == "c"
    assert choose(("a", "b", "c"), 2, {"a"}) == "a"
    assert choose(("a", "b", "c"), 1, set()) == "b"
