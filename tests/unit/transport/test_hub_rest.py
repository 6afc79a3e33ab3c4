"""Sockets in doubt: nobody waits while one of them may have a message that it will not tell of."""

import os
import select

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


@pytest.fixture
def mirror(hub):
    with select.epoll() as mirror:
        hub.mirror(mirror)
        yield mirror


@pytest.fixture
def bell():
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def test_a_mirror_finds_what_the_hub_would_and_that_can_be_read(hub, mirror, bell):
    rung = []
    hub.add_reader(bell, lambda: rung.append(os.eventfd_read(bell)))
    assert not mirror.poll(0)

    os.eventfd_write(bell, 3)
    hub.read(mirror.poll(0))
    assert rung == [3]

    hub.remove_reader(bell)
    os.eventfd_write(bell, 1)
    assert not mirror.poll(0)


def test_who_comes_too_late_for_what_a_mirror_found_reads_nothing(hub, mirror):
    read = []
    hub.call_soon(read.append, "message")
    found = mirror.poll(0)
    hub.read()
    hub.read(found)
    assert read == ["message"]
    assert not mirror.poll(0)
