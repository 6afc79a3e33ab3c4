"""Where only some ports may be used, no other one is."""

import errno
import socket

import pytest

from transport.errors import AddressError
from transport.ports import VARIABLE, bind_allowed


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_without_a_range_the_kernel_chooses():
    assert bind_allowed(lambda port: port, {}) == 0
    assert bind_allowed(lambda port: port, {VARIABLE: "junk"}) == 0


def test_every_port_of_a_range_is_tried_once():
    tried = []

    def bind(port: int) -> int:
        tried.append(port)
        raise OSError(errno.EADDRINUSE, "in use")

    with pytest.raises(AddressError, match="ports 20000-20009"):
        bind_allowed(bind, {VARIABLE: "20000-20009"})

    assert sorted(tried) == list(range(20000, 20010))


def test_a_port_that_somebody_has_is_passed_over():
    with listen(0) as holder:
        port = holder.getsockname()[1]
        if port == 65535:
            port -= 1
        with bind_allowed(listen, {VARIABLE: f"{port}-{min(port + 50, 65535)}"}) as other:
            assert port < other.getsockname()[1] <= port + 50


def test_what_fails_otherwise_is_not_tried_again():
    tried = []

    def bind(port: int) -> None:
        tried.append(port)
        raise OSError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        bind_allowed(bind, {VARIABLE: "20000-20009"})
    assert len(tried) == 1


def test_the_kernels_own_failure_is_passed_on():
    def bind(_: int) -> None:
        raise OSError(errno.EADDRINUSE, "none is free")

    with pytest.raises(OSError, match="none is free"):
        bind_allowed(bind, {})


def test_a_range_that_runs_backwards_has_no_port():
    with pytest.raises(AddressError, match="are all taken"):
        bind_allowed(lambda port: port, {VARIABLE: "5-3"})
