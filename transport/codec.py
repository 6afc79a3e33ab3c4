"""Records and values to bytes and back, in MessagePack; never pickle.

Two ways in. `encode` and `decode` carry one typed record, and check it against its type. `pack` and `unpack`
carry what users pass to a call and get back from it: any tree of plain values. There the first frame is
MessagePack, and each array in the tree is a descriptor in it and one frame after it, which is the array's own
memory on the way out and is looked at in place on the way in (see `transport.arrays`).

What comes out of `unpack` is plain: a Struct or dataclass is a dict, an Enum its value, a tuple or set a
list (a tuple again where it is the key of a dict), a Path a str. Who knows the type converts it, by
`msgspec.convert`.

Text with lone surrogates, which models do write, passes both ways. msgspec refuses it, so such text takes a
slower path; it is on the wire as UTF-8 would have it.

Bytes from the wire are hostile until read: whatever they are, there is a value or a `CodecError`, and no
allocation that the number of bytes received does not justify.
"""

import contextlib
import enum
import functools
from collections.abc import Hashable, Sequence
from typing import Any, Final, TypeVar, cast

import msgpack
import msgpack.fallback
import msgspec

from transport.arrays import ArrayReader, ArrayWriter
from transport.control import Frame
from transport.errors import CodecError
from transport.plain import children_of, plain

R = TypeVar("R")

_SURROGATES: Final = "surrogatepass"
_NOT_MESSAGEPACK: Final = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
    msgpack.UnpackException,
)
_NOT_PLAIN: Final = (ValueError, TypeError, OverflowError, RecursionError, BufferError)
_DEEPEST_PATH: Final = 64
_RECORD_DEPTH: Final = 3  # the arguments of a call, one of them, its first item
_SCALARS: Final = frozenset({int, float, bool, str, bytes, type(None)})

_record_encoder: Final = msgspec.msgpack.Encoder()


def _refuse_arrays(_code: int, _data: Frame) -> Any:
    raise ValueError("an array's frame is missing")


_array_free_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(ext_hook=_refuse_arrays)


def encode(record: msgspec.Struct) -> bytes:
    """Write one typed record.

    Raises:
        CodecError: a field holds what MessagePack has no type for, or an integer beyond 64 bits.
    """
    try:
        return _record_encoder.encode(record)
    except UnicodeEncodeError:
        return _encode_surrogates(record)
    except _NOT_PLAIN as error:
        raise CodecError(type(record).__name__, str(error)) from error


def decode(type_: type[R], data: Frame) -> R:
    """Read one record of a known type.

    Args:
        type_: the record's type, or a union of tagged ones.
        data: what `encode` wrote, or anything else.

    Raises:
        CodecError: names the type, what was expected, what was found and where.
    """
    try:
        record: R = _decoder(cast(Hashable, type_)).decode(data)
    except (msgspec.DecodeError, RecursionError, MemoryError) as error:
        if "UTF-8" in str(error):
            return _decode_surrogates(type_, data)
        raise _not_a(type_, error) from error
    return record


def pack(value: Any) -> list[Frame]:
    """Write a tree of plain values and arrays.

    Returns:
        One frame of MessagePack and one for each array, in the order they are met. An array that is
        C-contiguous is not copied: it must not change until the message arrived.

    Raises:
        CodecError: names the type that cannot be written and where in the value it is.
    """
    if type(value) in _SCALARS:
        return [pack_scalars(value)]
    if _is_of_records(value):
        with contextlib.suppress(*_NOT_PLAIN):  # what is wrong with it, and where, is found out below
            return _pack_records(value)
    writer = ArrayWriter()

    def replace(item: Any) -> Any:
        array = writer.write(item)
        return plain(item) if array is None else msgpack.ExtType(*array)

    try:
        return [_to_messagepack(value, replace), *writer.frames]
    except _NOT_PLAIN as error:
        raise _cannot_pack(value, error) from error


def is_scalar(value: Any) -> bool:
    """Whether `pack_scalars` takes a value as it is, or as an item of a list or tuple."""
    return type(value) in _SCALARS


def pack_scalars(value: Any) -> bytes:
    """Write what consists of scalars and of lists and tuples of them, as `pack` would, only sooner.

    Raises:
        CodecError: see `pack`.
    """
    try:
        return _record_encoder.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return _to_messagepack_or_refuse(value)


def unpack(frames: Sequence[Frame]) -> Any:
    """Read what `pack` wrote.

    Args:
        frames: of one message. Arrays in the result look into them, and keep them alive.

    Raises:
        CodecError: they are not what `pack` writes.
    """
    if not frames:
        raise CodecError("message", "has no frames")
    if len(frames) == 1:
        try:
            return _array_free_decoder.decode(frames[0])
        except _NOT_MESSAGEPACK:  # what it is, or what is wrong with it, is found out below
            pass
    reader = ArrayReader(frames[1:])
    try:
        value = _from_messagepack(frames[0], reader)
    except _NOT_MESSAGEPACK as error:
        raise CodecError("message", f"is not MessagePack: {_text_of(error)}") from error
    if reader.unread_frames:
        raise CodecError("message", f"has {reader.unread_frames} frames that no array asked for")
    return value


def _is_of_records(value: Any) -> bool:
    """Whether a value is of Structs or Enums, as between roles: one of them, or a list that begins so."""
    for _ in range(_RECORD_DEPTH):
        if isinstance(value, msgspec.Struct | enum.Enum):
            return True
        if type(value) is not list:
            return False
        value = next((each for each in value if type(each) not in _SCALARS), None)
    return False


def _pack_records(value: Any) -> list[Frame]:
    """Write what `pack` would, in C where there are no arrays."""
    writer = ArrayWriter()

    def replace(item: Any) -> Any:
        array = writer.write(item)
        return plain(item) if array is None else msgspec.msgpack.Ext(*array)

    return [msgspec.msgpack.encode(value, enc_hook=replace), *writer.frames]


def _to_messagepack_or_refuse(value: Any) -> bytes:
    try:
        return _to_messagepack(value, plain)
    except _NOT_PLAIN as error:
        raise _cannot_pack(value, error) from error


def _encode_surrogates(record: msgspec.Struct) -> bytes:
    try:
        return _to_messagepack(msgspec.to_builtins(record), plain)
    except _NOT_PLAIN as error:
        raise CodecError(type(record).__name__, str(error)) from error


def _decode_surrogates(type_: type[R], data: Frame) -> R:
    try:
        return msgspec.convert(_with_surrogates(data), type_)
    except _NOT_MESSAGEPACK as error:
        raise _not_a(type_, error) from error


@functools.cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_)


def _not_a(type_: Any, error: BaseException) -> CodecError:
    fact, _, path = _text_of(error).partition(" - at `")
    return CodecError(getattr(type_, "__name__", str(type_)), fact, path.removesuffix("`") or "$")


def _to_messagepack(value: Any, default: Any) -> bytes:
    packed: bytes = msgpack.packb(
        value, default=default, strict_types=True, use_bin_type=True, unicode_errors=_SURROGATES
    )
    return packed


def _from_messagepack(frame: Frame, reader: ArrayReader) -> Any:
    try:
        return msgspec.msgpack.decode(frame, ext_hook=reader.read)
    except msgspec.DecodeError as error:
        if "UTF-8" not in str(error):
            raise
        reader.rewind()
        return _with_surrogates(frame, reader.read)


def _with_surrogates(frame: Frame, ext_hook: Any = msgpack.ExtType) -> Any:
    """Read text as `_SURROGATES` has it; in Python, which allocates no list before it has its items."""
    unpacker = msgpack.fallback.Unpacker(
        object_pairs_hook=_dict_of,
        strict_map_key=False,
        unicode_errors=_SURROGATES,
        ext_hook=ext_hook,
        max_buffer_size=len(frame),
    )
    unpacker.feed(frame)
    value = unpacker.unpack()
    if unpacker.tell() != len(frame):
        raise ValueError(f"trailing bytes (byte {unpacker.tell()})")
    return value


def _dict_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {_hashable(key): value for key, value in pairs}


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def _cannot_pack(value: Any, error: BaseException) -> CodecError:
    """Find the innermost part of a value that cannot be packed, by trying each."""
    path, part = "$", value
    for _ in range(_DEEPEST_PATH):
        step = next(((name, child) for name, child in children_of(part) if not _packs(child)), None)
        if step is None:
            return CodecError(f"`{type(part).__qualname__}`", _text_of(error), path)
        path, part = path + step[0], step[1]
    return CodecError(f"`{type(value).__qualname__}`", "contains itself, or is nested too deeply")


def _packs(value: Any) -> bool:
    try:
        pack_quietly = ArrayWriter()
        _to_messagepack(value, lambda item: _placeholder(item, pack_quietly))
    except _NOT_PLAIN:
        return False
    return True


def _placeholder(item: Any, writer: ArrayWriter) -> Any:
    return plain(item) if writer.write(item) is None else None


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
