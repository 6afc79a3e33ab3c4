"""Which address and interface lead to another host."""

import pytest

from relax_actor import network


def test_the_loopback_interface_is_found_by_its_addresses():
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert "127.0.0.1" in network.addresses_of("lo")
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("203.0.113.7") == ""
    assert network.addresses_of("no-such-one") == []


def test_names_are_resolved():
    assert network.resolved("127.0.0.5") == "127.0.0.5"
    with pytest.raises(OSError, match="not known"):
        network.resolved("nowhere.invalid")


def test_collectives_and_proxies_are_told_and_the_user_knows_better():
    environ = {"GLOO_SOCKET_IFNAME": "eth5", "NO_PROXY": "mine,10.0.0.1"}
    network.set_environment(environ, peer="127.0.0.1", interface="", no_proxy=("10.0.0.1", "10.0.0.2"))
    assert environ == {
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "eth5",
        "no_proxy": "mine,10.0.0.1,10.0.0.2",
        "NO_PROXY": "mine,10.0.0.1,10.0.0.2",
    }


@pytest.mark.parametrize("peer", ["", "nowhere.invalid"])
def test_nothing_is_set_where_nothing_is_known(peer):
    environ = {}
    network.set_environment(environ, peer=peer, interface="", no_proxy=())
    assert environ == {}


def test_without_ipv6_there_are_no_such_addresses(monkeypatch, tmp_path):
    monkeypatch.setattr(network, "_IF_INET6", tmp_path / "none")
    assert network.addresses_of("no-such-one") == []


def test_a_link_local_address_keeps_its_zone_which_is_an_interface():
    try:
        assert network.resolved("fe80::1%lo") == "fe80::1%lo"
    except OSError:
        pytest.skip("no IPv6 here")
    assert network.interface_of("fe80::1%lo") == "lo"
    assert network.interface_of("fe80::1%eth9") == "eth9"
