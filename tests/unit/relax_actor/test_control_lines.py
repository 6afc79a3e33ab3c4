"""The lines between a head and those on other hosts: exactly once, in order, and nothing from the past."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actor.actor import wire
from relax_actor.actor.lines import HeadLine, Lines
from relax_actor.node.line import Line
from transport import codec
from transport.errors import ChannelFull, PeerUnreachable


class Connection:
    """Frames on their way between two lines; a break loses those."""

    def __init__(self):
        self.to_agent, self.to_head = deque(), deque()
        self.head, self.agent = Line(1, 1, self.to_agent.append), Line(1, 1, self.to_head.append)
        self.agent_heard, self.head_heard = [], []

    def deliver(self):
        while self.to_agent or self.to_head:
            if self.to_agent:
                self.take(self.agent, self.to_agent.popleft(), self.agent_heard)
            if self.to_head:
                self.take(self.head, self.to_head.popleft(), self.head_heard)

    def take(self, line, frames, heard):
        message = line.receive(frames)
        if message is None:
            return
        record, rest = message
        if isinstance(record, wire.Renew):
            line.beat(wire.Renewed(number=record.number))
        if isinstance(record, wire.Renew | wire.Renewed):
            line.recover()
        else:
            heard.append((record.name, [bytes(frame) for frame in rest]))

    def break_off(self):
        self.to_agent.clear()
        self.to_head.clear()


def order(name):
    return wire.Kill(name=name, incarnation=1)


def test_what_a_broken_connection_lost_is_sent_again_after_the_next_two_beats():
    link = Connection()
    link.head.say(order("x"), [b"frame"])
    link.break_off()
    link.head.say(order("y"))
    link.deliver()
    assert link.agent_heard == []  # y is not the next one
    for number in (1, 2):
        link.agent.beat(wire.Renew(number=number))
        link.deliver()
    assert link.agent_heard == [("x", [b"frame"]), ("y", [])]


def test_what_was_heard_is_not_sent_again():
    link = Connection()
    link.head.say(order("x"))
    link.deliver()
    for number in (1, 2, 3):
        link.agent.beat(wire.Renew(number=number))
        link.deliver()
    assert link.agent_heard == [("x", [])]
    link.head.recover()
    assert not link.to_agent


STEPS = st.lists(st.sampled_from(["order", "fact", "beat", "deliver", "break"]), max_size=60)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_everything_arrives_once_and_in_order_wherever_the_connection_breaks(steps):
    link, orders, facts = Connection(), [], []
    for step in steps:
        match step:
            case "order":
                orders.append(f"o{len(orders)}")
                link.head.say(order(orders[-1]))
            case "fact":
                facts.append(f"f{len(facts)}")
                link.agent.say(order(facts[-1]))
            case "beat":
                link.agent.beat(wire.Renew(number=1))
            case "deliver":
                link.deliver()
            case _:
                link.break_off()
        assert [name for name, _ in link.agent_heard] == orders[: len(link.agent_heard)]
        assert [name for name, _ in link.head_heard] == facts[: len(link.head_heard)]
    for _ in range(3):
        link.agent.beat(wire.Renew(number=1))
        link.deliver()
    assert [name for name, _ in link.agent_heard] == orders
    assert [name for name, _ in link.head_heard] == facts


@pytest.mark.parametrize(
    ("epoch", "incarnation", "reason"), [(1, 1, "epoch"), (3, 1, "epoch"), (2, 2, "incarnation")]
)
def test_another_epoch_or_incarnation_is_refused_and_counted(epoch, incarnation, reason):
    sent = []
    Line(epoch, incarnation, sent.append).say(order("x"))
    line = Line(2, 1, sent.append)
    assert line.receive(sent[0]) is None
    assert line.refused == {reason: 1}


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xff"],
        [codec.encode(order("x")), codec.encode(order("y"))],
        [codec.encode(wire.Carried(epoch=1, incarnation=1, number=1, heard=0))],
        [codec.encode(wire.Carried(epoch=1, incarnation=1, number=1, heard=0)), b"\xff"],
    ],
)
def test_what_is_no_message_is_refused_and_counted(frames):
    line = Line(1, 1, lambda _frames: None)
    assert line.receive(frames) is None
    assert line.refused == {"malformed": 1}


@pytest.mark.parametrize("error", [ChannelFull("x", 1), PeerUnreachable(b"x", "y")])
def test_what_the_network_does_not_take_is_kept_and_counted(error):
    sent, failures = [], [error]

    def send(frames):
        if failures:
            raise failures.pop()
        sent.append(frames)

    line = Line(1, 1, send)
    line.say(order("x"))
    assert line.refused == {"undeliverable": 1}
    line.recover()
    line.recover()
    assert len(sent) == 1


def test_a_head_answers_a_beat_and_refuses_whom_it_does_not_expect():
    sent = []
    lines = Lines(lambda peer, frames: sent.append((peer, frames)))
    lines.open(b"a#1", 1, 1)
    assert lines.say(b"a#1", order("x"), [])
    assert not lines.say(b"b#1", order("x"), [])
    beat = wire.Carried(epoch=1, incarnation=1, number=0, heard=0)
    record, _ = lines.receive(b"a#1", beat, [codec.encode(wire.Renew(number=7))])
    assert isinstance(record, wire.Renew)
    assert wire.decode(sent[-1][1][1]) == wire.Renewed(number=7)
    assert lines.receive(b"a#1", beat, [b"not a record"]) is None
    told = wire.Carried(epoch=1, incarnation=1, number=1, heard=0)
    assert lines.receive(b"a#1", told, [codec.encode(order("z"))]) == (order("z"), [])
    lines.close(b"a#1")
    assert lines.receive(b"a#1", beat, [b"whatever"]) == (beat, [b"whatever"])


class Loop:
    """What an actor's line needs of an event loop."""

    def __init__(self):
        self.later = []

    def call_later(self, delay_s, action):
        self.later.append((delay_s, action))


def test_an_actor_beats_and_is_told_again_what_it_missed():
    sent, loop = [], Loop()
    line = HeadLine(1, 1, 2.0)
    line.start(loop, sent.append)
    line.say(order("x"))
    [(delay_s, beat)] = loop.later
    assert delay_s == 2.0
    beat()
    renewed = [codec.encode(wire.Renewed(number=0))]
    for _ in range(2):
        carried = wire.Carried(epoch=1, incarnation=1, number=0, heard=0)
        assert line.receive(carried, renewed) is None
    said = [type(wire.decode(frames[1])) for frames in sent]
    assert said == [wire.Renew, wire.Kill, wire.Renew, wire.Kill]
    assert line.receive(carried, [b"not a record"]) is None
    stop = wire.Carried(epoch=1, incarnation=1, number=1, heard=1)
    assert line.receive(stop, [codec.encode(wire.Stop(reason="so"))]) == (wire.Stop(reason="so"), [])
