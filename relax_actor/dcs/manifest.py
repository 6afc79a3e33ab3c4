"""What a policy version consists of, and how that is written down.

A version is a set of buckets (shared-memory segments, each a valid `.safetensors` file) and one manifest,
which says which tensor lies where and what each bucket's checksum is. A version exists exactly as long as its
manifest has its final name.
"""

import functools
import struct
from enum import StrEnum
from typing import Self

import msgspec
import xxhash

from relax_actor.errors import RelaxError
from relax_actor.ids import PolicyVersion

OWNER = "dcs"
"""Owner of every segment of a version; the segment's incarnation is the policy version."""

MANIFEST_LABEL = "manifest"
STAGING_LABEL = "manifest.staging"

_MAGIC = b"rx-dcs\r\n"
_FORMAT = 2  # 1: buckets were not safetensors files
_HEADER = struct.Struct("<8sIQQ")  # magic, format, body bytes, xxh3-64 of the body
_CHUNK_BYTES = 8 << 20  # between two chunks another thread of the process may run


class PolicyCorruptError(RelaxError):
    """A policy version is not what was published; it must not be installed.

    Args:
        version: the policy version.
        bucket: which bucket is wrong; None is the manifest.
        expected: what was published: a checksum, or a length.
        found: what is there.
    """

    def __init__(self, version: PolicyVersion, bucket: int | None, expected: str, found: str) -> None:
        self.version, self.bucket, self.expected, self.found = version, bucket, expected, found
        part = "the manifest" if bucket is None else f"bucket {bucket}"
        super().__init__(f"{part} of policy version {version} is corrupt: expected {expected}, found {found}")


class Dtype(StrEnum):
    """The element types a version may hold, by the names torch and numpy share."""

    BOOL = "bool"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        bits = "".join(filter(str.isdigit, self.partition("_")[0]))
        return int(bits) // 8 if bits else 1


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies; row-major, without gaps."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int  # bytes from the start of the bucket
    nbytes: int


class BucketEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a version."""

    nbytes: int
    xxh3: str  # XXH3-64 of all bytes, 16 hex digits
    fold: str = ""  # of all bytes as well, where the publisher's GPU computed it: see cuda/fold.py


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole policy version: buckets in order, and tensors in the order of the buckets."""

    version: PolicyVersion
    step: int  # optimizer steps that led to it
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in all buckets, their heads included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def to_bytes(self) -> bytes:
        """Return the manifest with its magic, format number, length and checksum."""
        body = msgspec.msgpack.encode(self)
        return _HEADER.pack(_MAGIC, _FORMAT, len(body), xxhash.xxh3_64_intdigest(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes, version: PolicyVersion) -> Self:
        """Read what `to_bytes` wrote for `version`.

        Raises:
            PolicyCorruptError: torn, altered, of another format or of another version.
        """
        manifest = msgspec.msgpack.decode(_checked_body(data, version), type=cls)
        if manifest.version != version:
            raise PolicyCorruptError(version, None, f"version {version}", f"version {manifest.version}")
        return manifest


def bucket_label(index: int) -> str:
    """Return the label of a version's bucket."""
    return f"b{index}"


def checksum(data: memoryview) -> str:
    """Return the XXH3-64 of uint8 [n] as 16 hex digits."""
    state = xxhash.xxh3_64()
    for start in range(0, len(data), _CHUNK_BYTES):
        state.update(data[start : start + _CHUNK_BYTES])
    return state.hexdigest()


def _checked_body(data: bytes, version: PolicyVersion) -> bytes:
    if len(data) < _HEADER.size:
        raise PolicyCorruptError(version, None, f"at least {_HEADER.size} bytes", f"{len(data)}")
    magic, number, body_bytes, digest = _HEADER.unpack_from(data)
    if (magic, number) != (_MAGIC, _FORMAT):
        raise PolicyCorruptError(version, None, f"format {_FORMAT}", f"{magic!r}, format {number}")
    body = data[_HEADER.size :]
    if len(body) != body_bytes:
        raise PolicyCorruptError(version, None, f"{body_bytes} bytes", f"{len(body)}")
    found = xxhash.xxh3_64_intdigest(body)
    if found != digest:
        raise PolicyCorruptError(version, None, f"{digest:016x}", f"{found:016x}")
    return body
