"""Hosts as data: what is refused before anything starts, and which host a replica gets."""

import sys

import pytest

from relax_actor.supervision.hosts import LOCAL, Host, check_hosts, check_placement, choose, choose_home
from relax_actor.supervision.spec import ChildSpec, Home, SpecError, SupervisorSpec
from relax_actor.supervision.spec_checks import validate

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


def homes(*places):
    return tuple(Home(host=place[0], devices=tuple(place[1:])) for place in places)


def test_a_replica_is_at_home_wherever_its_host_is_there():
    places = homes("a0", "b0", "a1")
    assert [choose_home(places, replica, 3, {"a", "b"}, places) for replica in range(3)] == [*places]


def test_without_its_host_a_replica_takes_a_spare_place_that_nobody_has():
    own, other, spare, further = places = homes("a0", "b0", "b1", "c0")
    assert choose_home(places, 0, 2, {"b", "c"}, [other]) == spare
    assert choose_home(places, 0, 2, {"b", "c"}, [other, spare]) == further
    assert choose_home(places, 0, 2, {"b"}, [other, spare]) == own  # it waits


def test_the_place_of_another_replica_is_kept_for_it_though_it_is_away():
    own, _ = places = homes("a0", "b0")
    assert choose_home(places, 0, 2, {"b"}, []) == own


def test_without_devices_replicas_share_a_host_whose_own_is_lost():
    _, b, c = places = homes("a", "b", "c")
    assert choose_home(places, 0, 3, {"b", "c"}, [b, c]) == b
    assert choose_home(places, 1, 3, {"a", "c"}, []) == c


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"hosts": ("a",)}, "instead of hosts, devices and spares"),
        ({"devices": ("0",)}, "instead of hosts, devices and spares"),
        ({"replicas": 3}, "has 2 places for 3 replicas"),
    ],
)
def test_homes_that_fit_no_child_are_refused(fields, fact):
    child = ChildSpec(id="a", actor="m:A", homes=homes("a0", "b0"), **fields)
    with pytest.raises(SpecError, match=fact):
        validate(SupervisorSpec(id="root", children=(child,)))


def test_a_home_on_a_host_that_is_not_there_is_refused():
    child = ChildSpec(id="a", actor="m:A", homes=homes("a0", "c0"), replicas=2)
    with pytest.raises(SpecError, match="names 'c'"):
        check_placement(child, {"a", "b"})
