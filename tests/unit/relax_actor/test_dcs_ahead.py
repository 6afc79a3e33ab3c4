"""A version is verified in a thread: taken once, or let go of, whenever its verification ends."""

import threading

import pytest
from watching import eventually

from relax_actor.dcs.ahead import Ahead
from relax_actor.dcs.manifest import PolicyCorruptError


class Leased:
    """What stands for a snapshot: all that is asked of it is to be closed."""

    def __init__(self, version):
        self.version = version
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


class Gate:
    """Verifies when it may; says what it has leased."""

    def __init__(self):
        self.is_open = threading.Event()
        self.leased = {}

    def verified(self, version):
        self.leased[version] = Leased(version)
        assert self.is_open.wait(60)
        return self.leased[version]


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.is_open.set()


@pytest.fixture
def ahead(gate):
    return Ahead(gate.verified)


def await_done(ahead, version):
    eventually(lambda: ahead.prepare(version))


def test_what_was_prepared_is_taken_once(ahead, gate):
    assert not ahead.prepare(1)
    gate.is_open.set()
    await_done(ahead, 1)
    assert ahead.take(1) is gate.leased[1]
    assert ahead.take(1) is None
    assert not gate.leased[1].closed.is_set()


def test_who_takes_early_waits(ahead, gate):
    ahead.prepare(1)
    threading.Timer(0.02, gate.is_open.set).start()
    assert ahead.take(1) is gate.leased[1]


def test_another_version_is_not_taken_for_it(ahead, gate):
    ahead.prepare(1)
    assert ahead.take(2) is None
    gate.is_open.set()
    assert ahead.take(1) is gate.leased[1]


def test_what_was_not_prepared_is_not_there(ahead):
    ahead.drop()
    assert ahead.take(1) is None


@pytest.mark.parametrize("is_done", [True, False])
def test_an_overtaken_version_is_let_go_of_whether_or_not_its_verification_has_ended(ahead, gate, is_done):
    ahead.prepare(1)
    eventually(lambda: 1 in gate.leased)
    if is_done:
        gate.is_open.set()
        await_done(ahead, 1)
    ahead.prepare(2)
    gate.is_open.set()
    assert gate.leased[1].closed.wait(60)
    assert ahead.take(2) is gate.leased[2]


def test_what_verification_finds_is_raised_where_it_is_taken():
    def damaged(version):
        raise PolicyCorruptError(version, 0, "a", "b")

    ahead = Ahead(damaged)
    await_done(ahead, 1)
    with pytest.raises(PolicyCorruptError, match="bucket 0 of policy version 1"):
        ahead.take(1)
    await_done(ahead, 2)
    ahead.drop()
