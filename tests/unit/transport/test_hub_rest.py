"""Sockets in doubt: nobody waits while one of them may have a message that it will not tell of."""

import pytest

from transport.zmq_hub import Hub


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def test_a_socket_in_doubt_is_looked_at_before_anybody_waits(hub):
    looks = []
    assert hub.look_later(lambda: looks.append(1))
    assert not looks

    assert hub.rest()
    assert looks == [1]
    hub.wake()
    assert hub.rest()
    assert looks == [1]  # once


def test_while_somebody_waits_it_is_to_be_looked_at_now(hub):
    hub.rest()
    assert not hub.look_later(pytest.fail)
    hub.wake()
    assert hub.look_later(lambda: None)


def test_who_would_wait_while_a_message_is_there_reads_it_instead(hub):
    read = []
    hub.look_later(lambda: hub.call_soon(read.append, "message"))

    assert not hub.rest()
    hub.wake()
    hub.read()
    assert read == ["message"]
    assert hub.rest()
