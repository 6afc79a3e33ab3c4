"""The head of a bucket, which makes it a valid `.safetensors` file. Pure.

    8 bytes, little-endian: length of the JSON  ->  JSON, padded with spaces  ->  tensors without gaps

The padding lets the tensors start at a multiple of 64 bytes. Within a bucket they lie by falling element
size, so that each is aligned to its element although nothing lies between them. The format allows neither
gaps nor overlaps, which is why a tensor under two names is two tensors here.

Source:
    https://github.com/huggingface/safetensors, "Format".
"""

import math
import struct
from collections.abc import Iterable

import msgspec

from relax_actor.dcs.manifest import Dtype

ALIGN_BYTES = 64  # a cache line, and more than any element needs
RESERVED = "__metadata__"
"""The one name no tensor can have."""

# Readers that serve several frameworks want to be told whose tensors these are.
_METADATA = {RESERVED: {"format": "pt"}}
_LENGTH = struct.Struct("<Q")
_EMPTY_BYTES = _LENGTH.size + len(msgspec.json.encode(_METADATA))
_CODES = {
    Dtype.BOOL: "BOOL",
    Dtype.UINT8: "U8",
    Dtype.UINT16: "U16",
    Dtype.UINT32: "U32",
    Dtype.UINT64: "U64",
    Dtype.INT8: "I8",
    Dtype.INT16: "I16",
    Dtype.INT32: "I32",
    Dtype.INT64: "I64",
    Dtype.FLOAT16: "F16",
    Dtype.FLOAT32: "F32",
    Dtype.FLOAT64: "F64",
    Dtype.BFLOAT16: "BF16",
    Dtype.FLOAT8_E4M3FN: "F8_E4M3",
    Dtype.FLOAT8_E5M2: "F8_E5M2",
}


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor without its bytes."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def head_and_offsets(tensors: Iterable[Described]) -> tuple[bytes, list[int]]:
    """Lay tensors out in one file.

    Returns:
        The file's first bytes, a multiple of 64 of them; and where each tensor starts, in bytes from the
        start of the file, in the order given.
    """
    given = list(tensors)
    starts = [0] * len(given)
    table: dict[str, object] = dict(_METADATA)
    end = 0
    for index in sorted(range(len(given)), key=lambda i: -given[i].dtype.itemsize):
        starts[index] = end
        end += given[index].nbytes
        table[given[index].name] = _described(given[index], starts[index], end)
    head = _padded(msgspec.json.encode(table))
    return head, [len(head) + start for start in starts]


def entry_bound_bytes(tensor: Described, data_bytes: int) -> int:
    """Return what a tensor adds to the JSON, at most, in a file of up to `data_bytes` of tensors."""
    entry = {tensor.name: _described(tensor, data_bytes, data_bytes)}
    return len(msgspec.json.encode(entry)) - 1  # a comma more, two braces less


def head_bound_bytes(entries_bytes: int) -> int:
    """Return the length of a head whose entries take up to `entries_bytes`, at most."""
    return _aligned(_EMPTY_BYTES + entries_bytes)


def _described(tensor: Described, start: int, end: int) -> dict[str, object]:
    return {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}


def _padded(text: bytes) -> bytes:
    body_bytes = _aligned(_LENGTH.size + len(text)) - _LENGTH.size
    return _LENGTH.pack(body_bytes) + text.ljust(body_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
