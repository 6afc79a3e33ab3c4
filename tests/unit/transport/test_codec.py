import contextlib
import dataclasses
import enum
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgpack
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transport.codec import decode, encode, pack, unpack
from transport.errors import CodecError


class Color(enum.StrEnum):
    RED = "red"


class Odd(enum.Enum):
    ONE = object()


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    numbers: tuple[int, ...] = ()


class Outer(msgspec.Struct, frozen=True, kw_only=True, tag="outer"):
    inner: Inner
    color: Color = Color.RED


class Row(msgspec.Struct, array_like=True, tag="row"):
    x: int
    y: int


class Column(msgspec.Struct, array_like=True, rename="upper"):
    x: int


@dataclasses.dataclass
class Point:
    x: int
    where: Path


class Text(str):
    __slots__ = ()

    def __str__(self):
        return "overridden"


class Count(int):
    pass


class Pair(NamedTuple):
    left: int
    right: int


def test_a_record_comes_back_equal():
    record = Outer(inner=Inner(name="é", numbers=(1, -(2**63), 2**64 - 1)))

    assert decode(Outer, encode(record)) == record


@pytest.mark.parametrize("name", ["\ud83d", "a\udc00b", "\ud83d\ude00\udfff"])
def test_a_record_with_lone_surrogates_comes_back_equal(name):
    record = Outer(inner=Inner(name=name, numbers=(1,)))

    assert decode(Outer, encode(record)) == record


@pytest.mark.parametrize(
    ("value", "fact", "path"),
    [
        ({"name": 1}, "Expected `str`, got `int`", "$.name"),
        ({"name": "a", "numbers": [1, "x"]}, "Expected `int`, got `str`", "$.numbers[1]"),
        ({}, "Object missing required field `name`", "$"),
        ([1], "Expected `object`, got `array`", "$"),
        ({"name": "\ud83d", "numbers": ["x"]}, "Expected `int`, got `str`", "$.numbers[0]"),
    ],
)
def test_a_record_of_another_shape_is_refused_by_type_expected_got_and_path(value, fact, path):
    data = msgpack.packb(value, unicode_errors="surrogatepass")

    with pytest.raises(CodecError) as caught:
        decode(Inner, data)

    assert (caught.value.what, caught.value.fact, caught.value.path) == ("Inner", fact, path)


@pytest.mark.parametrize("value", [object(), 2**64, 1j])
def test_a_record_that_cannot_be_written_is_refused(value):
    class Loose(msgspec.Struct):
        text: str
        anything: object

    with pytest.raises(CodecError, match="Loose"):
        encode(Loose("", value))
    with pytest.raises(CodecError, match="Loose"):
        encode(Loose("\ud83d", value))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        ((1, (2, [3])), [1, [2, [3]]]),
        ({1}, [1]),
        (frozenset(), []),
        (Pair(1, 2), [1, 2]),
        (OrderedDict(a=1), {"a": 1}),
        (Color.RED, "red"),
        (Path("/x/y"), "/x/y"),
        (Text("x"), "x"),
        (Count(7), 7),
        (np.float64(0.5), 0.5),
        (np.int8(-3), -3),
        (np.bool_(1), True),
        (np.str_("s"), "s"),
        (np.bytes_(b"s"), b"s"),
        (bytearray(b"ab"), b"ab"),
        (b"\0\xff", b"\0\xff"),
        ({(1, ("a", 2)): 3, 4: 5, None: 6}, {(1, ("a", 2)): 3, 4: 5, None: 6}),
        ({(1, 2): "\ud83d"}, {(1, 2): "\ud83d"}),
        ("\ud83d, \udfff", "\ud83d, \udfff"),
        (Point(1, Path("p")), {"x": 1, "where": "p"}),
        (
            Outer(inner=Inner(name="n")),
            {"type": "outer", "inner": {"name": "n", "numbers": []}, "color": "red"},
        ),
        (Row(1, 2), ["row", 1, 2]),
        (Column(1), [1]),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
    ],
)
def test_a_value_arrives_plain(value, plain):
    assert unpack(pack(value)) == plain
    assert unpack(pack([{"deep": value}])) == [{"deep": plain}]


@pytest.mark.parametrize(
    ("value", "what", "path"),
    [
        (object(), "`object`", "$"),
        ([Color.RED, Odd.ONE], "`Odd`", "$[1]"),
        ({"a": [1, {"b": {1j}}]}, "`complex`", "$.a[1].b[0]"),
        ([Inner(name=object())], "`object`", "$[0].name"),
        ([Point(1, b"ok"), Point(2, len)], "`builtin_function_or_method`", "$[1].where"),
        ({object: 1}, "`type`", "${<class 'object'>}"),
        ([2**64], "`int`", "$[0]"),
        ([-(2**63) - 1], "`int`", "$[0]"),
        ([np.array(["text"])], "`ndarray`", "$[0]"),
        ([np.array([None])], "`ndarray`", "$[0]"),
        ([np.longdouble(1)], "`longdouble`", "$[0]"),
        ([np.datetime64("2026-01-01")], "`datetime64`", "$[0]"),
        ([np.ones(1), torch.ones(1, device="meta")], "`Tensor`", "$[1]"),
        ([torch.eye(2).to_sparse()], "`Tensor`", "$[0]"),
        ([memoryview(b"abcd")[::2]], "`memoryview`", "$[0]"),
    ],
)
def test_what_cannot_be_packed_is_named_with_its_place(value, what, path):
    with pytest.raises(CodecError) as caught:
        pack(value)

    assert (caught.value.what, caught.value.path.split(" at 0x")[0]) == (what, path)


def test_a_value_that_contains_itself_is_refused():
    circle = []
    circle.append(circle)

    with pytest.raises(CodecError, match="contains itself"):
        pack(circle)


def test_arrays_travel_beside_the_message_and_uncopied():
    array, tensor = np.arange(6, dtype=np.float32).reshape(2, 3), torch.arange(4, dtype=torch.bfloat16)

    frames = pack([Inner(name="x"), {"a": array, "t": tensor}])
    array[0, 0], tensor[0] = 42, 43
    value = unpack(frames)[1]

    assert len(frames) == 3
    assert value["a"][0, 0] == 42
    assert value["t"][0] == 43
    assert np.shares_memory(value["a"], array)
    assert value["t"].data_ptr() == tensor.data_ptr()


def test_arrays_inside_of_records_travel_beside_the_message():
    class Batch(msgspec.Struct):
        data: object

    frames = pack(Batch((np.ones(3), [np.zeros(2)])))

    assert [memoryview(frame).nbytes for frame in frames[1:]] == [24, 16]


def test_a_value_of_records_says_what_the_longer_way_says(monkeypatch):
    """Messages between roles are written in C; what is on the wire is the same."""
    values = [
        Outer(inner=Inner(name="a", numbers=(1, 2)), color=Color.RED),
        [[Inner(name="a"), [Row(1, 2), Column(x=3)]], {"k": Point(1, Path("x"))}],
        [[3, [Outer(inner=Inner(name="lone \ud800"))]], {}],
        [Inner(name="set", numbers={1})],
        [Color.RED, Color.RED],
        [Inner(name="text", numbers=(Text("t"), Count(4), np.float64(2.5), Pair(1, 2)))],
    ]
    short = [unpack(pack(value)) for value in values]
    monkeypatch.setattr("transport.codec._is_of_records", lambda _value: False)
    assert short == [unpack(pack(value)) for value in values]


@given(
    hnp.arrays(
        dtype=st.one_of(hnp.scalar_dtypes().filter(lambda d: d.kind in "biufc" and d.itemsize <= 16)),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_every_numeric_array_comes_back_equal(array):
    if array.dtype.name in ("longdouble", "float128"):
        return
    for sent in (array, array.T, array[..., None][..., ::-1]):
        frames = pack(sent)
        for received in (unpack(frames), unpack([bytes(frame) for frame in frames])):
            assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
            assert received.tobytes() == sent.tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.5], requires_grad=True),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
        torch.arange(3, dtype=torch.uint8),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
@pytest.mark.parametrize(
    "as_received", [list, lambda frames: [bytes(f) for f in frames]], ids=["lent", "bytes"]
)
def test_every_tensor_comes_back_equal(tensor, as_received):
    received = unpack(as_received(pack(tensor)))

    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert not received.requires_grad
    assert torch.equal(received.to(torch.complex64), tensor.detach().to(torch.complex64))


def test_an_array_at_an_odd_address_is_copied_to_an_even_one():
    frames = pack([np.arange(3, dtype=np.int64), torch.arange(3)])
    odd = [memoryview(bytearray(b"x" + bytes(frame)))[1:] for frame in frames]

    array, tensor = unpack(odd)

    assert array.flags.aligned
    assert tensor.data_ptr() % 8 == 0
    assert array.tolist() == tensor.tolist() == [0, 1, 2]


def descriptor(frame=0, dtype="<f4", shape=(1,), code=1):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb([frame, dtype, shape])))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\x01\x01"],
        [b"\xa1\xff"],
        [b"\xa1\xff\x01"],
        [b"\xa3\xed\xa0\xbd\x01"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xdf\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xff"],
        [b"\x91" * 5000],
        [b"\x91" * 5000 + b"\xa1\xff"],
        [b"\x81" + b"\x81\x01\x01" + b"\x01"],
        [b"\x82" + b"\xa1\xff\x01" + b"\x81\x01\x01" + b"\x01"],
        [b"\x01", b"nobody asked for this"],
        [descriptor()],
        [descriptor(frame=1), b"abcd"],
        [descriptor(frame=-1), b"abcd"],
        [descriptor(code=3), b"abcd"],
        [b"\xd4\xff\x00"],
        [descriptor(dtype="|O"), b"abcdefgh"],
        [descriptor(dtype="<f3"), b"abcd"],
        [descriptor(dtype="f4,f4"), b"abcdefgh"],
        [descriptor(dtype="<U1"), b"abcd"],
        [descriptor(dtype="float32"), b"abcd"],
        [descriptor(dtype=7), b"abcd"],
        [descriptor(shape=(2,)), b"abcd"],
        [descriptor(shape=(-1,)), b"abcd"],
        [descriptor(shape=(-1, -1)), b"abcd"],
        [descriptor(shape=(2**62, 0)), b""],
        [descriptor(shape=(1,) * 33), b"abcd"],
        [descriptor(shape=(2**63,)), b"abcd"],
        [descriptor(code=2, dtype="float32", shape=(2**62, 0)), b"abcd"],
        [descriptor(code=2, dtype="load", shape=(1,)), b"abcd"],
        [descriptor(code=2, dtype="float32", shape=(0, 2**63 - 1)), b""],
        [msgpack.packb(msgpack.ExtType(1, b"\xc1")), b"abcd"],
        [b"\x92" + 2 * descriptor(), b"abcd"],
    ],
)
def test_hostile_frames_are_refused_as_such(frames):
    try:
        value = unpack(frames)
    except CodecError:
        return
    assert getattr(value, "size", 1) == 0 or value.numel() == 0  # a large shape with nothing in it is honest


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_any_bytes_are_a_value_or_a_codec_error(frames):
    for attempt in (lambda: unpack(frames), lambda: decode(Outer, b"".join(frames))):
        with contextlib.suppress(CodecError):
            attempt()


@given(st.data(), st.recursive(st.none() | st.text() | st.integers(-9, 9), st.lists, max_leaves=5))
def test_damaged_messages_are_values_or_codec_errors(data, value):
    first, *rest = pack([value, np.arange(3), {"t": torch.ones(2)}])
    damaged = bytearray(first)
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))

    for frames in ([damaged, *rest], [damaged[:cut], *rest], [first, *rest[::-1]], [first]):
        with contextlib.suppress(CodecError):
            unpack(frames)


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(categories=("L", "Cs", "So")))
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-5, 5), inner),
    max_leaves=20,
)


@given(JSON_LIKE)
def test_every_tree_of_plain_values_comes_back_equal(value):
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("tail", [b"", b"\xa1\xff"], ids=["fast path", "surrogate path"])
def test_lengths_that_lie_allocate_nothing(tail):
    size = 1 << 20
    lies = b"".join(b"\xdd" + struct.pack(">I", size - 5 * i - 9) for i in range(500))
    frame = b"\x92" + tail + lies + b"\xc0" * (size - len(lies)) if tail else lies + b"\xc0" * 1000

    tracemalloc.start()
    with pytest.raises(CodecError):
        unpack([frame])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 16 * size
