"""Streams between two ends of this process: real sockets on loopback."""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from watching import eventually

from transport.address import Address
from transport.stream import (
    TICKET_BYTES,
    Stream,
    StreamError,
    StreamListener,
    StreamTimeoutError,
)

PATIENCE_S = 30.0


@pytest.fixture
def listener():
    made = StreamListener("127.0.0.1", timeout_s=PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def pair(listener):
    """Both ends of a stream."""
    with both_ends(listener, PATIENCE_S) as ends:
        yield ends


@pytest.fixture
def hasty(listener):
    """Both ends of a stream, of which the first does not wait for long."""
    with both_ends(listener, 0.2) as ends:
        yield ends


@contextmanager
def both_ends(listener, timeout_s):
    there, met, done = [], threading.Event(), threading.Event()

    def on_stream(stream):
        there.append(stream)
        met.set()
        done.wait()

    try:
        with Stream.connect(listener.address, listener.ticket(on_stream), timeout_s) as here:
            assert met.wait(20)
            yield here, there[0]
    finally:
        done.set()


def test_records_and_payloads_arrive_in_order_and_payloads_in_place(pair):
    here, there = pair
    payload = bytes(range(256)) * 1000
    there.send(b"first")
    sender = threading.Thread(target=there.send, args=(b"second", memoryview(payload)))
    sender.start()
    assert here.receive() == (b"first", 0)
    record, nbytes = here.receive()
    assert (record, nbytes) == (b"second", len(payload))
    target = bytearray(nbytes)
    here.receive_into(memoryview(target)[:1000])
    here.receive_into(memoryview(target)[1000:])
    sender.join()
    assert target == payload


def test_silence_is_a_timeout_that_says_how_long(hasty):
    here, _ = hasty
    with pytest.raises(StreamTimeoutError, match=r"sent nothing for 0\.2 s"):
        here.receive()


def test_an_end_that_takes_nothing_is_a_timeout(hasty):
    here, _ = hasty
    with pytest.raises(StreamTimeoutError, match=r"took nothing for 0\.2 s"):
        here.send(b"x", memoryview(bytearray(64 << 20)))


def test_the_end_of_the_other_side_is_told(pair):
    here, there = pair
    there.end()
    with pytest.raises(StreamError, match="was ended by the other end"):
        here.receive()


def test_whoever_waits_is_woken_when_the_stream_is_ended(pair):
    here, _ = pair
    threading.Timer(0.02, here.end).start()
    with pytest.raises(StreamError, match="was ended by the other end"):  # and no time-out
        here.receive()
    here.close()
    here.end()


def test_a_broken_pipe_is_an_error_of_the_stream(pair):
    here, there = pair
    there.end()
    eventually(lambda: here._connection.recv(1) == b"")

    def send_on():
        for _ in range(100):
            here.send(b"x")

    with pytest.raises(StreamError, match="broke"):
        send_on()


def test_an_absurd_record_is_refused_before_memory_is_taken_for_it(pair):
    here, there = pair
    there._send_all(memoryview(b"\xff" * 12))
    with pytest.raises(StreamError, match="announced a record of 4294967295 bytes"):
        here.receive()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n" + b"x" * 40, b"\0" * TICKET_BYTES])
def test_a_stranger_hears_nothing(listener, said):
    heard = []
    listener.ticket(heard.append)
    with socket.create_connection((listener.address.host, listener.address.port), timeout=10) as stranger:
        stranger.sendall(said)
        with suppress(OSError):  # what it said was not read to its end
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    eventually(lambda: listener.refused == 1)
    assert heard == []


def test_a_ticket_is_good_once_and_for_its_time(listener, monkeypatch):
    served = []
    ticket = listener.ticket(served.append)
    Stream.connect(listener.address, ticket, PATIENCE_S).close()
    eventually(lambda: served)
    Stream.connect(listener.address, ticket, PATIENCE_S).close()
    eventually(lambda: listener.refused == 1)
    monkeypatch.setattr("transport.stream.TICKET_S", 0.0)
    Stream.connect(listener.address, listener.ticket(served.append), PATIENCE_S).close()
    eventually(lambda: listener.refused == 2)
    assert len(served) == 1


def test_a_stranger_who_says_nothing_is_closed_and_too_many_are_not_met(monkeypatch):
    monkeypatch.setattr("transport.stream.MAX_STRANGERS", 1)
    monkeypatch.setattr("transport.stream.HANDSHAKE_S", 0.3)
    listener = StreamListener("127.0.0.1", timeout_s=1.0)
    where = (listener.address.host, listener.address.port)
    with (
        socket.create_connection(where, timeout=20) as silent,
        socket.create_connection(where, timeout=20) as next_one,
    ):
        assert next_one.recv(1) == b""
        assert silent.recv(1) == b""
    listener.close()


def test_nobody_there_is_an_error_of_the_stream(listener):
    listener.close()
    with pytest.raises(StreamError, match="could not be opened"):
        Stream.connect(listener.address, b"x" * TICKET_BYTES, 1.0)


def test_ipv6_works_where_there_is_any():
    try:
        listener = StreamListener("::1", timeout_s=1.0)
    except OSError:
        pytest.skip("no IPv6 here")
    served = threading.Event()
    with Stream.connect(listener.address, listener.ticket(lambda _: served.set()), PATIENCE_S):
        assert served.wait(20)
    assert isinstance(listener.address, Address)
    listener.close()


def test_a_listener_keeps_to_the_ports_that_are_allowed(monkeypatch):
    monkeypatch.setenv("RELAX_ACTOR_PORTS", "28000-28999")
    listeners = [StreamListener("127.0.0.1", timeout_s=0.2) for _ in range(5)]
    ports = {listener.address.port for listener in listeners}
    for listener in listeners:
        listener.close()

    assert len(ports) == 5
    assert all(28000 <= port <= 28999 for port in ports)
