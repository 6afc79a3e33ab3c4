"""When a server is asked for a token, and what follows from the answer."""

from concurrent.futures import Future

import pytest

from relax_actor.engines.sglang.errors import DeadlineError, ServerGoneError, ServerHungError
from relax_actor.engines.sglang.health import Health
from transport.clock import ManualClock


class Server:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked, self.used = [], 0

    def get(self, path, *, deadline_s):
        if self.used is None:
            raise DeadlineError(path, deadline_s)
        return {"loads": [{"timestamp": object(), "num_used_tokens": self.used}]}

    def start(self, *_, **__):
        self.asked.append(Future())
        return self.asked[-1]


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def health(server, clock):
    return Health(server, every_s=10.0, on_ready=lambda: None, clock=clock)


def test_nobody_asks_while_tokens_come(health, server, clock):
    for progress in range(1, 9):
        clock.advance(9.0)
        assert health.look(progress)
    assert not server.asked


def test_a_token_is_asked_for_after_a_silence_and_its_coming_is_a_sign_of_life(health, server, clock):
    clock.advance(9.0)
    assert health.next_s == 1.0
    assert not health.look(0)
    clock.advance(1.0)
    assert not health.look(0)
    assert len(server.asked) == 1
    assert not health.look(0)  # it is awaited
    server.asked[0].set_result({})
    assert health.look(0)
    assert health.next_s == 10.0


def test_an_update_is_followed_by_a_question(health, server):
    health.ask_now()
    health.look(0)
    assert len(server.asked) == 1


@pytest.mark.parametrize("used", [0, None])
def test_a_token_that_does_not_come_from_a_server_that_stands_still_means_hung(health, server, clock, used):
    clock.advance(10.0)
    health.look(0)
    server.used = used
    server.asked[0].set_exception(DeadlineError("/generate", 10.0))
    with pytest.raises(ServerHungError):
        health.look(0)


def test_a_server_whose_load_changes_has_much_to_do(health, server, clock):
    clock.advance(10.0)
    health.look(0)
    server.used = 5
    server.asked[0].set_exception(DeadlineError("/generate", 10.0))
    assert health.look(0)


def test_a_server_that_is_gone_is_said_to_be(health, server, clock):
    clock.advance(10.0)
    health.look(0)
    server.asked[0].set_exception(ServerGoneError("gone"))
    with pytest.raises(ServerGoneError):
        health.look(0)
