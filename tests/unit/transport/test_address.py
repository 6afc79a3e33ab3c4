from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.address import UNIX_PATH_LIMIT_BYTES, Address
from transport.errors import AddressError, TransportError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://node-7.cluster:0", "node-7.cluster", 0),
        ("tcp://127.0.0.1:65535", "127.0.0.1", 65535),
        ("tcp://[::1]:5555", "::1", 5555),
        ("tcp://[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("tcp://[::]:0", "::", 0),
        ("tcp://[::ffff:10.0.0.1]:9", "::ffff:10.0.0.1", 9),
    ],
)
def test_a_tcp_address_is_read_and_written_back(text, host, port):
    address = Address.parse(text)

    assert (address.scheme, address.host, address.port, address.path) == ("tcp", host, port, "")
    assert str(address) == text
    assert address.is_ipv6 == ("[" in text)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "no known scheme"),
        ("ipc", "no known scheme"),
        ("http://x:1", "no known scheme"),
        ("tcp://::1:5555", "without brackets"),
        ("tcp://fe80::1", "without brackets"),
        ("tcp://[::1]", "without brackets"),
        ("tcp://[node7]:1", "no IPv6 address"),
        ("tcp://[127.0.0.1]:1", "no IPv6 address"),
        ("tcp://[::1%]:1", "neither a name nor an IP"),
        ("tcp://[::1%a b]:1", "neither a name nor an IP"),
        ("tcp://[1:2]:1", "neither a name nor an IP"),
        ("tcp://[]:1", "no IPv6 address"),
        ("tcp://node7", "no port number"),
        ("tcp://node7:", "no port number"),
        ("tcp://node7:+1", "no port number"),
        ("tcp://node7: 1", "no port number"),
        ("tcp://node7:1\n", "no port number"),
        ("tcp://node7:x", "no port number"),
        ("tcp://node7:65536", "0 to 65535"),
        ("tcp://node7:99999", "0 to 65535"),
        ("tcp://*:5555", "wildcard"),
        ("tcp://:5555", "neither a name nor an IP"),
        ("tcp://a b:1", "neither a name nor an IP"),
        ("tcp://user@host:1", "neither a name nor an IP"),
        ("tcp://300.1.1.1:1", "neither a name nor an IP"),
        ("tcp://1.2.3:1", "neither a name nor an IP"),
        ("tcp://" + "a" * 254 + ":1", "neither a name nor an IP"),
        ("ipc://", "absolute path"),
        ("ipc://run/x.sock", "absolute path"),
        ("ipc://@abstract", "absolute path"),
        ("ipc:///a\0b", "absolute path"),
        ("ipc:///\ud83d", "absolute path"),
        ("ipc://*", "absolute path"),
        ("loop://", "needs a name"),
        ("loop://a/b", "needs a name"),
    ],
)
def test_a_bad_address_is_refused_and_named(text, fact):
    with pytest.raises(AddressError, match=r"^address `") as caught:
        Address.parse(text)

    assert fact in caught.value.fact
    assert isinstance(caught.value, TransportError | ValueError)


def test_an_error_shows_its_hint_after_a_blank_line():
    with pytest.raises(AddressError) as caught:
        Address.parse("tcp://::1:5555")

    assert str(caught.value).endswith("\n\nhint: write tcp://[::1]:5555")


def test_a_unix_path_may_have_107_bytes_and_no_more():
    longest = Path("/" + "x" * (UNIX_PATH_LIMIT_BYTES - 1))

    assert Address.parse(str(Address.ipc(longest))).path == str(longest)
    with pytest.raises(AddressError, match="path of 108 bytes, and the kernel allows 107") as caught:
        Address.ipc(Path(f"{longest}y"))
    assert "xxxy" in caught.value.address


def test_the_limit_of_a_unix_path_counts_bytes_and_not_characters():
    with pytest.raises(AddressError, match="path of 121 bytes"):
        Address.ipc(Path("/" + "é" * 60))


def test_a_port_is_filled_in_for_tcp_only():
    assert Address.tcp("::1").with_port(7) == Address.parse("tcp://[::1]:7")
    with pytest.raises(AddressError, match="no port"):
        Address.loop("queue").with_port(7)


def test_equal_addresses_are_one_key():
    assert len({Address.loop("a"), Address.parse("loop://a"), Address.tcp("a", 1)}) == 2


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_and_port_round_trips(ip, port):
    address = Address.tcp(str(ip), port)

    assert Address.parse(str(address)) == address


@given(st.text())
def test_any_text_is_an_address_or_an_address_error(text):
    for candidate in (text, f"tcp://{text}", f"ipc://{text}", f"loop://{text}"):
        try:
            address = Address.parse(candidate)
        except AddressError:
            continue
        assert Address.parse(str(address)) == address
