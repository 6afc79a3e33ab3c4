"""Sockets that several threads use in turn: nothing is lost, whoever reads."""

import asyncio
import select
import threading
import time

import pytest

from transport.address import Address
from transport.zmq_control import ZmqNetwork
from transport.zmq_hub import Hub

MESSAGES = 3000
IN_FLIGHT = 300


@pytest.fixture
def world(tmp_path):
    """A listener that echoes and a channel to it, both read by hand."""
    hub, answers = Hub(), []

    async def make():
        network = ZmqNetwork(hub=hub)
        listener = network.listen(Address.ipc(tmp_path / "s"), echo)
        return network, listener

    def echo(peer, frames):
        listener.send(peer, frames)

    loop = asyncio.new_event_loop()
    with hub.lock:
        network, listener = loop.run_until_complete(make())
        channel = network.connect(listener.address, lambda frames: answers.append(bytes(frames[0])))
    yield hub, channel, answers
    with hub.lock:
        network.close()
    hub.close()
    hub.close()
    hub.read()  # a closed hub reads nothing
    hub.catch_up()
    assert hub.is_closed()
    loop.close()


def test_who_catches_up_has_read_all_that_is_here(world):
    """More than has its turn at once, and nobody rests meanwhile, who would look at what is in doubt."""
    hub, channel, answers = world
    with hub.lock:
        for number in range(IN_FLIGHT):
            channel.send([b"%d" % number])
    deadline = time.monotonic() + 30.0
    while len(answers) < IN_FLIGHT:
        assert time.monotonic() < deadline, "it did not come"
        hub.catch_up()
    assert answers == [b"%d" % number for number in range(IN_FLIGHT)]


def read_until(hub, condition, timeout_s=30.0):
    poller = select.epoll()
    poller.register(hub.fileno(), select.EPOLLIN)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        if not hub.rest() or poller.poll(1.0):
            hub.read()
        hub.wake()
    poller.close()


def send_all(hub, channel, answers, numbers):
    for number in numbers:
        deadline = time.monotonic() + 30.0
        while len(answers) < number - IN_FLIGHT:
            assert time.monotonic() < deadline, "nobody reads"
            time.sleep(0.0005)
        with hub.lock:
            channel.send([b"%d" % number])


def test_what_one_thread_sends_another_reads_in_order_and_no_wake_up_is_lost(world):
    hub, channel, answers = world
    sender = threading.Thread(target=send_all, args=(hub, channel, answers, range(MESSAGES)))
    sender.start()
    read_until(hub, lambda: len(answers) == MESSAGES)
    sender.join()
    assert answers == [b"%d" % number for number in range(MESSAGES)]


def test_two_threads_may_read_at_once(world):
    hub, channel, answers = world
    readers = [threading.Thread(target=read_until, args=(hub, lambda: len(answers) >= 500)) for _ in range(2)]
    for reader in readers:
        reader.start()
    send_all(hub, channel, answers, range(500))
    for reader in readers:
        reader.join()
    assert answers == [b"%d" % number for number in range(500)]


def test_what_a_callback_raises_is_logged_and_the_rest_is_read(world, tmp_path, caplog):
    hub, channel, answers = world
    answers.append(b"first")

    def take(frames):
        if bytes(frames[0]) == b"bad":
            raise ValueError("not this one")
        answers.append(bytes(frames[0]))

    channel._pump._on_frames = take
    with hub.lock:
        channel.send([b"bad"])
        channel.send([b"good"])
    read_until(hub, lambda: b"good" in answers)
    assert "a message's callback failed" in caplog.text
