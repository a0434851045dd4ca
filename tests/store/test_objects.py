"""Objects of lower tiers: what is put in comes out, and whatever was changed is noticed."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_serve.errors import StoreError
from td_serve.store.objects import DIGEST_BYTES, decode, encode


class About(msgspec.Struct):
    text: str


class Other(msgspec.Struct):
    number: int


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
]
tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9
    ).to(dtype),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)


def bits(one: torch.Tensor) -> bytes:
    return bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy())


def sealed(data: bytes) -> bytes:
    """With the digest that it should have."""
    return data + hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@given(st.text(), st.lists(tensors, max_size=5))
def test_what_is_put_in_comes_out(text: str, some: list[torch.Tensor]) -> None:
    about, found = decode(encode(About(text), some), About)
    assert about == About(text)
    assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in some]
    assert list(map(bits, found)) == list(map(bits, some))


def test_a_view_comes_out_as_what_it_shows() -> None:
    some = torch.arange(24.0).view(4, 6)
    _, (found, column) = decode(encode(About(""), [some.t(), some[1:3, 2:5]]), About)
    assert torch.equal(found, some.t())
    assert torch.equal(column, some[1:3, 2:5])


@given(st.data())
def test_whatever_is_changed_or_cut_off_is_noticed(data: st.DataObject) -> None:
    whole = encode(About("text"), [torch.arange(9.0)])
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[place] ^= bit
    for spoilt in (bytes(changed), whole[:place], whole + b"\0"):
        with pytest.raises(StoreError):
            decode(spoilt, About)


def test_an_older_version_is_named() -> None:
    whole = bytearray(encode(About("text"), []))
    struct.pack_into("<H", whole, 4, 0)
    with pytest.raises(StoreError, match="version 0 of the format, expected 1"):
        decode(sealed(bytes(whole[:-DIGEST_BYTES])), About)


def test_another_kind_of_object_is_refused() -> None:
    with pytest.raises(StoreError, match="header"):
        decode(encode(About("text"), []), Other)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (("f32", [2**30, 2**9]), "a tensor of 2199023255552 bytes"),
        (("f32", [1]), "4 bytes behind"),
        (("object", [2]), "dtype is 'object'"),
        (("f32", [-1]), "header"),
        (("f32", [1] * 9), "header"),
    ],
)
def test_sealed_nonsense_is_refused_before_memory_is_taken(
    kind: tuple[str, list[int]], message: str
) -> None:
    """As one could write it who may write to the tier."""
    header = msgspec.msgpack.encode((msgspec.msgpack.encode(About("")), [kind]))
    data = struct.pack("<4sHI", b"TDKV", 1, len(header)) + header + bytes(8)
    with pytest.raises(StoreError, match=message):
        decode(sealed(data), About)


def test_a_header_longer_than_the_object_is_refused() -> None:
    with pytest.raises(StoreError, match="a header of 4294967295 bytes"):
        decode(sealed(struct.pack("<4sHI", b"TDKV", 1, 2**32 - 1)), About)


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(StoreError, match="complex64"):
        encode(About(""), [torch.zeros(1, dtype=torch.complex64)])
