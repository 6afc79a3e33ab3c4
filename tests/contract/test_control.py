"""What every control network promises, asked of ZeroMQ over ipc and tcp, and of the loopback fake."""

import asyncio
import itertools
import random
import time
from collections import Counter
from contextlib import suppress

import pytest

from transport.address import Address
from transport.clock import ManualClock
from transport.control import Limits
from transport.errors import AddressError, ChannelClosed, ChannelFull, MessageTooLarge, PeerUnreachable
from transport.loopback import LoopbackNetwork
from transport.security import CurveKeys
from transport.zmq_control import ZmqNetwork

DEADLINE_S = 20.0
SMALL = Limits(max_message_bytes=10_000, high_water_messages=8)


class ZmqWorld:
    """Listener and channels in networks of their own, as in processes of their own."""

    def __init__(self, address, keys=None):
        self._new_address, self._keys = address, keys
        self._loop = asyncio.new_event_loop()
        self.network, self.other_network = self.new_network(), self.new_network()

    def new_network(self):
        return ZmqNetwork(self._loop, self._keys)

    def new_address(self):
        return self._new_address()

    def until(self, is_so):
        """Run the loop until something holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline_s, "it never came about"
            self.turn()

    def turn(self):
        self._loop.run_until_complete(asyncio.sleep(0.001))

    def close(self):
        self.network.close()
        self.other_network.close()
        self._loop.close()


class LoopbackWorld:
    def __init__(self):
        self.network = self.other_network = LoopbackNetwork(ManualClock())
        self._names = itertools.count()

    def new_address(self):
        return Address.loop(f"listener-{next(self._names)}")

    def until(self, is_so):
        for _ in range(1000):
            if is_so():
                return
            self.turn()
        raise AssertionError("it never came about")

    def turn(self):
        self.network.run_until_idle()

    def close(self):
        self.network.close()


@pytest.fixture(params=["zmq-ipc", "zmq-tcp", "loopback"])
def world(request, tmp_path):
    if request.param == "loopback":
        world = LoopbackWorld()
    elif request.param == "zmq-ipc":
        names = itertools.count()
        world = ZmqWorld(lambda: Address.ipc(tmp_path / f"{next(names)}.sock"))
    else:
        world = ZmqWorld(lambda: Address.tcp("127.0.0.1"), CurveKeys.generate())
    yield world
    world.close()


class Inbox(list):
    """A callback that keeps what it is given, as bytes."""

    def __call__(self, *message):
        *peer, frames = message
        self.append((*peer, [bytes(frame) for frame in frames]))


def send_until(world, send, is_so):
    """Send again and again until something holds: at most once is not always once."""

    def attempt():
        with suppress(ChannelFull, PeerUnreachable):
            send()
        world.turn()
        return is_so()

    world.until(attempt)


def test_a_message_arrives_whole_and_once_with_the_name_of_its_sender(world):
    inbox = Inbox()
    listener = world.network.listen(world.new_address(), inbox)
    channel = world.other_network.connect(listener.address, Inbox(), identity=b"rollout/3")

    channel.send([b"header", b"", b"\0\xff", memoryview(b"view"), bytearray(b"array")])
    world.until(lambda: inbox)

    assert inbox == [(b"rollout/3", [b"header", b"", b"\0\xff", b"view", b"array"])]


def test_an_answer_goes_to_the_peer_it_is_for_and_to_no_other(world):
    listener_inbox, inboxes = Inbox(), [Inbox() for _ in range(5)]
    listener = world.network.listen(world.new_address(), listener_inbox)
    channels = [world.other_network.connect(listener.address, inbox) for inbox in inboxes]

    for index, channel in enumerate(channels):
        channel.send([bytes([index])])
    world.until(lambda: len(listener_inbox) == 5)
    for peer, frames in listener_inbox:
        listener.send(peer, [b"to", *frames])
    world.until(lambda: all(inboxes))

    assert inboxes == [[([b"to", bytes([index])],)] for index in range(5)]
    assert len({peer for peer, _ in listener_inbox}) == 5
    assert all(peer[0] == 0 for peer, _ in listener_inbox), "a made-up identity starts with 0"


def test_a_listener_may_speak_first_once_the_peer_is_connected(world):
    inbox = Inbox()
    listener = world.network.listen(world.new_address(), Inbox())
    world.other_network.connect(listener.address, inbox, identity=b"a")

    send_until(world, lambda: listener.send(b"a", [b"hello"]), lambda: inbox)

    assert inbox[0] == ([b"hello"],)


def test_each_senders_messages_arrive_in_order(world):
    inbox = Inbox()
    listener = world.network.listen(world.new_address(), inbox)
    names = [b"a", b"b", b"c"]
    channels = [world.other_network.connect(listener.address, Inbox(), identity=name) for name in names]

    for number in range(200):
        for channel in channels:
            channel.send([str(number).encode()])
    world.until(lambda: len(inbox) == 600)

    for name in names:
        assert [int(frames[0]) for peer, frames in inbox if peer == name] == list(range(200))


def test_connect_may_come_before_listen(world):
    first = world.network.listen(world.new_address(), Inbox())
    address = first.address
    first.close()
    inbox, replies = Inbox(), Inbox()
    channel = world.other_network.connect(address, replies, identity=b"early")

    for number in range(3):
        channel.send([bytes([number])])
    world.turn()
    listener = world.network.listen(address, inbox)
    world.until(lambda: len(inbox) == 3)
    listener.send(b"early", [b"welcome"])
    world.until(lambda: replies)

    assert [frames for _, frames in inbox] == [[b"\0"], [b"\1"], [b"\2"]]


def test_what_waits_for_a_listener_that_never_comes_is_bounded(world):
    first = world.network.listen(world.new_address(), Inbox())
    address = first.address
    first.close()
    channel = world.other_network.connect(address, Inbox(), limits=SMALL)

    for _ in range(SMALL.high_water_messages):
        channel.send([b"waits"])

    with pytest.raises(ChannelFull, match="8 waiting messages") as caught:
        channel.send([b"one too many"])
    assert caught.value.receiver == str(address)


def test_a_slow_receiver_loses_nothing_that_was_accepted(world):
    received = Counter()
    listener = world.network.listen(
        world.new_address(), lambda _, frames: received.update(map(bytes, frames)), SMALL
    )
    channel = world.other_network.connect(listener.address, Inbox(), limits=SMALL)

    accepted = set()
    for number in range(5000):
        message = b"%5d" % number + b"x" * 5000
        with suppress(ChannelFull):
            channel.send([message])
            accepted.add(message)
    world.until(lambda: len(received) == len(accepted))

    assert len(accepted) < 5000
    assert set(received) == accepted
    assert set(received.values()) == {1}


def test_a_peer_that_does_not_listen_fills_its_own_channel_only(world):
    requests, inbox = Inbox(), Inbox()
    listener = world.network.listen(world.new_address(), requests, SMALL)
    slow = world.other_network.connect(listener.address, Inbox(), identity=b"slow", limits=SMALL)
    other = world.other_network.connect(listener.address, inbox, identity=b"other", limits=SMALL)
    slow.send([b"x"])
    other.send([b"x"])
    world.until(lambda: len(requests) == 2)

    def flood():
        for _ in range(5000):
            listener.send(b"slow", [b"x" * 5000])

    with pytest.raises(ChannelFull, match="slow") as caught:
        flood()
    listener.send(b"other", [b"still heard"])
    world.until(lambda: inbox)

    assert caught.value.high_water_messages == 8


@pytest.mark.parametrize("size_bytes", [0, 1, 8191, 8192, 65535, 65536, 5_000_000])
def test_frames_of_every_size_arrive_both_ways(world, size_bytes):
    frame = random.Random(size_bytes).randbytes(size_bytes)
    requests, replies = Inbox(), Inbox()
    listener = world.network.listen(world.new_address(), requests)
    channel = world.other_network.connect(listener.address, replies)

    channel.send([frame, b"x", frame])
    world.until(lambda: requests)
    listener.send(requests[0][0], [memoryview(frame)])
    world.until(lambda: replies)

    assert requests[0][1] == [frame, b"x", frame]
    assert replies == [([frame],)]


def test_received_frames_are_the_receivers_to_change(world):
    frames = []
    listener = world.network.listen(world.new_address(), lambda _, message: frames.extend(message))
    channel = world.other_network.connect(listener.address, Inbox())
    small, large = b"a" * 10, b"b" * 100_000

    channel.send([small, large])
    world.until(lambda: frames)
    for frame in frames:
        frame[:1] = b"!"

    assert [bytes(frame[:2]) for frame in frames] == [b"!a", b"!b"]
    assert (small[:2], large[:2]) == (b"aa", b"bb")


def test_a_message_at_the_limit_arrives_and_one_over_it_is_refused_before_anything_is_sent(world):
    requests, replies = Inbox(), Inbox()
    listener = world.network.listen(world.new_address(), requests, SMALL)
    channel = world.other_network.connect(listener.address, replies, identity=b"a", limits=SMALL)

    with pytest.raises(MessageTooLarge, match=r"10,001 bytes is over the limit of 10,000") as caught:
        channel.send([b"x" * 5000, b"x" * 5001])
    channel.send([b"x" * 5000, b"x" * 5000])
    world.until(lambda: requests)
    with pytest.raises(MessageTooLarge):
        listener.send(b"a", [b"x" * 10_001])
    listener.send(b"a", [b"x" * 10_000])
    world.until(lambda: replies)

    assert (caught.value.message_bytes, caught.value.limit_bytes) == (10_001, 10_000)
    assert len(requests) == len(replies) == 1


def test_a_message_that_is_none_is_refused_and_leaves_the_channel_whole(world):
    requests = Inbox()
    listener = world.network.listen(world.new_address(), requests)
    channel = world.other_network.connect(listener.address, Inbox())

    with pytest.raises(ValueError, match="at least one frame"):
        channel.send([])
    with pytest.raises(ValueError, match="contiguous"):
        channel.send([b"first", memoryview(b"abcdef")[::2]])
    with pytest.raises(TypeError):
        channel.send([b"first", "text"])
    channel.send([b"well"])
    world.until(lambda: requests)

    assert [frames for _, frames in requests] == [[b"well"]]


def test_an_unknown_peer_is_unreachable(world):
    listener = world.network.listen(world.new_address(), Inbox())

    with pytest.raises(PeerUnreachable, match="nobody") as caught:
        listener.send(b"nobody", [b"x"])

    assert (caught.value.peer, caught.value.address) == (b"nobody", str(listener.address))


def test_a_peer_that_closed_becomes_unreachable(world):
    requests = Inbox()
    listener = world.network.listen(world.new_address(), requests)
    channel = world.other_network.connect(listener.address, Inbox(), identity=b"a")
    channel.send([b"x"])
    world.until(lambda: requests)

    channel.close()

    def is_unreachable():
        try:
            listener.send(b"a", [b"x"])
        except PeerUnreachable:
            return True
        return False

    world.until(is_unreachable)


def test_an_identity_belongs_to_who_connected_with_it_last(world):
    requests, old_inbox, new_inbox = Inbox(), Inbox(), Inbox()
    listener = world.network.listen(world.new_address(), requests)
    old = world.other_network.connect(listener.address, old_inbox, identity=b"a")
    old.send([b"old"])
    world.until(lambda: requests)

    new = world.other_network.connect(listener.address, new_inbox, identity=b"a")
    new.send([b"new"])
    world.until(lambda: len(requests) == 2)
    listener.send(b"a", [b"answer"])
    world.until(lambda: new_inbox)

    assert old_inbox == []


def test_a_listener_that_comes_back_hears_its_channels_again(world):
    replies = Inbox()
    first = world.network.listen(world.new_address(), Inbox())
    channel = world.other_network.connect(first.address, replies, identity=b"faithful")
    first.close()
    for life in (b"1", b"2", b"3"):
        requests = Inbox()
        listener = world.network.listen(first.address, requests)
        send_until(world, lambda: channel.send([b"x"]), requests.copy)
        listener.send(b"faithful", [life])
        world.until(lambda life=life: ([life],) in replies)
        listener.close()


def test_a_channel_that_comes_back_under_its_name_is_answered(world):
    requests = Inbox()
    listener = world.network.listen(world.new_address(), requests)
    for life in (b"1", b"2", b"3"):
        replies = Inbox()
        channel = world.other_network.connect(listener.address, replies, identity=b"a")
        channel.send([life])
        world.until(lambda life=life: (b"a", [life]) in requests)
        send_until(world, lambda life=life: listener.send(b"a", [life]), lambda replies=replies: replies)
        channel.close()


def test_close_may_be_repeated_and_what_is_sent_later_is_refused(world):
    requests = Inbox()
    listener = world.network.listen(world.new_address(), requests)
    channel = world.other_network.connect(listener.address, Inbox(), identity=b"a")
    channel.send([b"x"])
    world.until(lambda: requests)

    for end in (channel, listener):
        end.close()
        end.close()

    with pytest.raises(ChannelClosed, match="is closed"):
        channel.send([b"x"])
    with pytest.raises(ChannelClosed) as caught:
        listener.send(b"a", [b"x"])
    assert caught.value.address == str(listener.address)


def test_a_closed_network_has_closed_what_it_made_and_makes_no_more(world):
    listener = world.network.listen(world.new_address(), Inbox())
    channel = world.network.connect(listener.address, Inbox())

    world.network.close()
    world.network.close()

    with pytest.raises(ChannelClosed):
        channel.send([b"x"])
    with pytest.raises(ChannelClosed):
        listener.send(b"a", [b"x"])
    with pytest.raises(ChannelClosed):
        world.network.listen(world.new_address(), Inbox())
    with pytest.raises(ChannelClosed):
        world.network.connect(listener.address, Inbox())


def test_a_callback_that_raises_is_reported_and_the_next_message_is_heard(world, caplog):
    inbox = Inbox()

    def fail_at_first(peer, frames):
        inbox(peer, frames)
        if len(inbox) == 1:
            raise RuntimeError("this message is cursed")

    listener = world.network.listen(world.new_address(), fail_at_first)
    channel = world.other_network.connect(listener.address, Inbox())
    channel.send([b"1"])
    channel.send([b"2"])
    world.until(lambda: len(inbox) == 2)

    assert "a message's callback failed" in caplog.text
    assert "this message is cursed" in caplog.text


def test_an_end_may_be_closed_by_its_own_callback(world):
    calls = []

    def close_at_once(peer, frames):
        calls.append(frames)
        listener.close()

    listener = world.network.listen(world.new_address(), close_at_once)
    channel = world.other_network.connect(listener.address, Inbox())
    for _ in range(5):
        channel.send([b"x"])
    world.until(lambda: calls)
    for _ in range(5):
        world.turn()

    assert len(calls) == 1


def test_a_second_listener_at_the_same_address_is_refused_and_the_first_goes_on(world):
    requests = Inbox()
    listener = world.network.listen(world.new_address(), requests)

    for network in (world.network, world.other_network):
        with pytest.raises(AddressError, match="in use") as caught:
            network.listen(listener.address, Inbox())
        assert caught.value.address == str(listener.address)
    world.other_network.connect(listener.address, Inbox()).send([b"x"])
    world.until(lambda: requests)


@pytest.mark.parametrize("identity", [b"", b"\0abc", b"x" * 256])
def test_an_identity_that_the_wire_cannot_carry_is_refused(world, identity):
    listener = world.network.listen(world.new_address(), Inbox())

    with pytest.raises(ValueError, match="an identity has 1 to 255 bytes"):
        world.other_network.connect(listener.address, Inbox(), identity=identity)


def test_an_address_of_another_network_is_refused(world):
    own = world.new_address().scheme
    foreign = Address.loop("x") if own != "loop" else Address.tcp("127.0.0.1", 1)

    with pytest.raises(AddressError, match="Loopback"):
        world.network.listen(foreign, Inbox())
    with pytest.raises(AddressError, match="Loopback"):
        world.network.connect(foreign, Inbox())


def test_a_tcp_listener_keeps_to_the_ports_that_are_allowed(monkeypatch):
    monkeypatch.setenv("RELAX_ACTOR_PORTS", "29000-29002")
    world = ZmqWorld(lambda: Address.tcp("127.0.0.1"), CurveKeys.generate())
    listeners = [world.network.listen(world.new_address(), Inbox()) for _ in range(3)]

    with pytest.raises(AddressError, match="ports 29000-29002"):
        world.network.listen(world.new_address(), Inbox())

    assert sorted(listener.address.port for listener in listeners) == [29000, 29001, 29002]
    world.close()
