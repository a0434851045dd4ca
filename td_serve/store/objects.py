"""One object of a lower tier, as bytes: what it is, tensors, and a digest of it all.

      bytes
          4  b"TDKV"
          2  the format's version (all numbers are little-endian)
          4  the header's length
          …  the header: msgpack of `_Header`
          …  the tensors, one after the other, row by row
         32  BLAKE2b-256 of everything before

Nothing in it is ever executed, and nothing is believed that has not been checked: whoever can write
to the tier can make an object unreadable, or another object of this format, but nothing else of it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import torch

from td_serve.errors import StoreError

VERSION = 1
DIGEST_BYTES = 32
_MAGIC = b"TDKV"
_PRELUDE = struct.Struct("<4sHI")
_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_DIMENSIONS = 8

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
T = TypeVar("T")


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """`about` is msgpack of what the object is; of each tensor its dtype and its shape."""

    about: bytes
    tensors: list[tuple[str, Annotated[list[Size], msgspec.Meta(max_length=_MOST_DIMENSIONS)]]]


def encode(about: msgspec.Struct, tensors: Sequence[torch.Tensor]) -> bytes:
    """One object, its tensors on the CPU or not. Raises StoreError for a dtype that has no name."""
    kinds = [(dtype_name(one.dtype), list(one.shape)) for one in tensors]
    header = msgspec.msgpack.encode(_Header(msgspec.msgpack.encode(about), kinds))
    parts: list[bytes | memoryview] = [_PRELUDE.pack(_MAGIC, VERSION, len(header)), header]
    parts += [_raw(one) for one in tensors]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def digest_of(data: bytes) -> bytes:
    """The digest that an object ends with."""
    return data[-DIGEST_BYTES:]


def decode(data: bytes | memoryview, kind: type[T]) -> tuple[T, list[torch.Tensor]]:
    """What an object is, and its tensors, in memory of their own.

    Raises StoreError: no object, one of another version, cut off, changed, or not of this kind.
    """
    if len(data) < _PRELUDE.size + DIGEST_BYTES:
        raise StoreError(f"{len(data)} bytes, too few for an object")
    magic, version, length = _PRELUDE.unpack_from(data)
    if magic != _MAGIC:
        raise StoreError(f"begins with {magic!r}, expected {_MAGIC!r}")
    if version != VERSION:
        raise StoreError(f"version {version} of the format, expected {VERSION}")
    body = memoryview(data)[:-DIGEST_BYTES]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != bytes(data[-DIGEST_BYTES:]):
        raise StoreError("its digest is another one: it was cut off, or changed")
    if _PRELUDE.size + length > len(body):
        raise StoreError(f"a header of {length} bytes, in {len(body)}")
    try:
        header = msgspec.msgpack.decode(body[_PRELUDE.size :][:length], type=_Header)
        about = msgspec.msgpack.decode(header.about, type=kind)
    except msgspec.DecodeError as error:
        raise StoreError(f"its header: {error}") from error
    return about, _tensors(header, body[_PRELUDE.size + length :])


def _tensors(header: _Header, payload: memoryview) -> list[torch.Tensor]:
    found = []
    at = 0
    for name, shape in header.tensors:
        dtype = dtype_of(name)
        size = math.prod(shape) * dtype.itemsize
        if at + size > len(payload):
            raise StoreError(f"a tensor of {size} bytes, where {len(payload) - at} are left")
        made = torch.empty(shape, dtype=dtype)
        if size:
            raw = torch.frombuffer(bytearray(payload[at : at + size]), dtype=torch.uint8)
            made = raw.view(dtype).view(shape)
        found.append(made)
        at += size
    if at != len(payload):
        raise StoreError(f"{len(payload) - at} bytes behind its tensors")
    return found


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name. Raises StoreError."""
    if name not in _DTYPES:
        raise StoreError(f"a tensor's dtype is {name!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in objects. Raises StoreError if it has none."""
    if dtype not in _NAMES:
        raise StoreError(f"a tensor's dtype is {dtype}, expected one of {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def _raw(one: torch.Tensor) -> memoryview:
    flat = one.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
