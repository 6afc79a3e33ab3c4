import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import KeysError
from transport.security import ZAP_DOMAIN, CurveKeys, zap_reply

KEYS = CurveKeys.generate()
ALLOWED = b"k" * 32
REQUEST = [b"1.0", b"7", ZAP_DOMAIN, b"10.0.0.1", b"identity", b"CURVE", ALLOWED]


def test_keys_come_back_equal_from_bytes():
    assert CurveKeys.from_bytes(KEYS.to_bytes()) == KEYS


def test_every_run_has_keys_of_its_own():
    assert CurveKeys.generate() != KEYS


def test_secrets_are_not_shown():
    assert KEYS.server_public.decode() in repr(KEYS)
    assert KEYS.server_secret.decode() not in repr(KEYS)
    assert KEYS.client_secret.decode() not in repr(KEYS)


LINES = KEYS.to_bytes().splitlines()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n".join(LINES[:4]),
        b"\n".join([*LINES, LINES[1]]),
        b"\n".join([b"relax-actor keys 2", *LINES[1:]]),
        b"\n".join([LINES[0], b"short", *LINES[2:]]),
        b"\n".join([LINES[0], b"'" * 40, *LINES[2:]]),
        b"\n".join([LINES[0], LINES[2], LINES[1], *LINES[3:]]),
        b"\n".join([*LINES[:3], LINES[4], LINES[3]]),
        b"\n".join([*LINES[:2], b"#" * 40, *LINES[3:]]),
    ],
)
def test_what_is_no_set_of_keys_is_refused_without_quoting_it(data):
    with pytest.raises(KeysError, match="keys of a test: ") as caught:
        CurveKeys.from_bytes(data, "a test")

    assert not any(line.decode() in str(caught.value) for line in LINES[1:])


@given(st.binary(max_size=250) | st.lists(st.text("#0aZ", min_size=40, max_size=40), min_size=4, max_size=4))
def test_any_bytes_are_keys_or_a_keys_error(data):
    if isinstance(data, list):
        data = "\n".join([LINES[0].decode(), *data]).encode()
    with pytest.raises(KeysError):
        CurveKeys.from_bytes(data)


def test_a_channel_of_the_run_is_let_in():
    assert zap_reply(REQUEST, ALLOWED) == [b"1.0", b"7", b"200", b"OK", b"", b""]


@pytest.mark.parametrize(
    "request_",
    [
        [],
        [b"1.0"],
        REQUEST[:6],
        [*REQUEST, b"more"],
        [*REQUEST[:6], b"x" * 32],
        [*REQUEST[:6], b""],
        [*REQUEST[:5], b"NULL"],
        [*REQUEST[:5], b"PLAIN", b"user", b"password"],
        [*REQUEST[:2], b"other domain", *REQUEST[3:]],
        [b"2.0", *REQUEST[1:]],
    ],
)
def test_anybody_else_is_refused(request_):
    reply = zap_reply(request_, ALLOWED)

    assert reply[2] == b"400"
    assert len(reply) == 6


def test_keys_are_as_long_as_zeromq_wants_them():
    assert zmq.curve_public(KEYS.client_secret) == KEYS.client_public
    assert {len(key) for key in LINES[1:]} == {40}
