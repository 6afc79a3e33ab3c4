import pytest

from transport.address import Address
from transport.clock import ManualClock
from transport.control import Limits
from transport.errors import ChannelFull, PeerUnreachable
from transport.loopback import LoopbackNetwork

QUEUE, OTHER = Address.loop("queue"), Address.loop("other")


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def network(clock):
    return LoopbackNetwork(clock)


@pytest.fixture
def heard():
    return []


@pytest.fixture
def listener(network, clock, heard):
    return network.listen(QUEUE, lambda _, frames: heard.append((clock.monotonic(), bytes(frames[0]))))


@pytest.fixture
def replies():
    return []


@pytest.fixture
def channel(network, listener, replies):
    return network.connect(QUEUE, lambda frames: replies.append(bytes(frames[0])), identity=b"a")


def test_nothing_arrives_before_it_is_delivered(network, channel, heard):
    channel.send([b"x"])
    assert heard == []

    assert network.deliver() == 1
    assert heard == [(100.0, b"x")]
    assert network.deliver() == 0


def test_a_delayed_message_arrives_at_its_moment_and_the_clock_is_moved_there(network, channel, heard, clock):
    network.set_delay(QUEUE, 5.0)
    channel.send([b"x"])

    assert network.deliver() == 0
    assert network.deliver(until_s=104.9) == 0
    assert clock.monotonic() == pytest.approx(104.9)
    assert network.deliver(until_s=110.0) == 1
    assert clock.monotonic() == 110.0
    assert heard == [(105.0, b"x")]


def test_messages_of_many_links_arrive_in_the_order_of_their_moments(network, channel, heard):
    other = []
    network.listen(OTHER, lambda *_: other.append(len(heard)))
    slow = network.connect(OTHER, print)
    network.set_delay(OTHER, 3.0)
    slow.send([b"x"])
    channel.send([b"1"])
    network.set_delay(QUEUE, 9.0)
    channel.send([b"2"])

    assert network.run_until_idle() == 3
    assert (heard, other) == ([(100.0, b"1"), (109.0, b"2")], [1])


def test_a_shorter_delay_overtakes_nobody(network, channel, heard):
    network.set_delay(QUEUE, 5.0)
    channel.send([b"1"])
    network.set_delay(QUEUE, 0.0)
    channel.send([b"2"])

    network.run_until_idle()

    assert heard == [(105.0, b"1"), (105.0, b"2")]


def test_what_is_sent_in_answer_is_delivered_too(network, clock):
    left = [10]

    def answer(peer, frames):
        listener.send(peer, frames)

    def again(frames):
        left[0] -= 1
        if left[0]:
            channel.send(frames)

    listener = network.listen(OTHER, answer)
    channel = network.connect(OTHER, again)
    network.set_delay(OTHER, 1.0)
    channel.send([b"x"])

    assert network.run_until_idle() == 20
    assert clock.monotonic() == 120.0


def test_dropped_messages_are_lost_and_the_next_one_arrives(network, listener, channel, heard, replies):
    network.drop_next(QUEUE, 2)
    channel.send([b"1"])
    listener.send(b"a", [b"2"])
    channel.send([b"3"])

    network.run_until_idle()

    assert (heard, replies) == ([(100.0, b"3")], [])


def test_over_a_cut_channels_wait_and_peers_are_unreachable(network, listener, channel, heard, replies):
    channel.send([b"on the way"])
    listener.send(b"a", [b"lost on the way"])

    network.cut(QUEUE)
    channel.send([b"waits"])
    with pytest.raises(PeerUnreachable):
        listener.send(b"a", [b"x"])
    assert network.run_until_idle() == 0
    network.heal(QUEUE)
    network.run_until_idle()
    listener.send(b"a", [b"back"])
    network.run_until_idle()

    assert [text for _, text in heard] == [b"on the way", b"waits"]
    assert replies == [b"back"]


def test_a_cut_concerns_no_other_address(network, listener, channel, heard):
    network.cut(OTHER)
    channel.send([b"x"])

    assert network.run_until_idle() == 1


def test_exactly_the_high_water_mark_may_wait(network, listener):
    limits = Limits(high_water_messages=3)
    channel = network.connect(QUEUE, print, limits=limits)
    for _ in range(3):
        channel.send([b"x"])

    with pytest.raises(ChannelFull):
        channel.send([b"x"])
    network.deliver()
    channel.send([b"x"])


def test_a_listener_that_left_loses_what_was_on_the_way_from_it(network, listener, channel, replies):
    bystander = network.connect(OTHER, print)
    listener.send(b"a", [b"x"])
    listener.close()
    network.listen(QUEUE, print)

    assert network.run_until_idle() == 0
    assert replies == []
    bystander.close()
