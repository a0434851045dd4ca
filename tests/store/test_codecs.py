"""Codecs: what is lossless is the same bit for bit; what is not loses little, and takes little."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_serve.store.codecs import Codec, Codecs, Coded, followed
from td_serve.store.kv import KV

LAYERS = 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_kv(tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> KV:
    """With a channel that stands out, as keys have."""
    made = torch.Generator().manual_seed(seed)
    rows = [torch.randn(tokens, width, generator=made) for _ in range(2 * LAYERS)]
    for plane in rows:
        plane[:, :1] *= 20
    return KV([one.to(dtype) for one in rows[:LAYERS]], [one.to(dtype) for one in rows[LAYERS:]])


def everything(kv: KV | Coded) -> torch.Tensor:
    planes = [plane for layer in range(LAYERS) for plane in kv.at(layer, slice(0, kv.tokens))]
    return torch.stack(planes).float()


@given(
    tokens=st.integers(0, 70),
    width=st.sampled_from([32, 64, 96, 192]),
    codec=st.sampled_from([Codec.INT8, Codec.INT4]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_what_is_lost_is_less_than_a_step(
    tokens: int, width: int, codec: Codec, dtype: torch.dtype, seed: int
) -> None:
    kv = random_kv(tokens, width, dtype, seed)
    coded = Coded.of(kv, codec)
    assert coded.tokens == tokens
    was, now = everything(kv), everything(coded)
    assert was.shape == now.shape
    lost = (was - now).square().mean(-1).sqrt()
    # The largest of 64 turned numbers is at most as large as all of them together.
    step = was.square().sum(-1).sqrt() / {Codec.INT8: 127, Codec.INT4: 7}[codec]
    rounding = was.abs().amax(-1) * torch.finfo(dtype).eps
    assert (lost <= step + rounding + 1e-6).all()


@given(
    tokens=st.integers(1, 50),
    beginning=st.integers(0, 8),
    edges=st.lists(st.integers(0, 50), min_size=2, max_size=2).map(sorted),
    codec=st.sampled_from([Codec.INT8, Codec.INT4]),
)
def test_parts_and_wholes_are_the_same(
    tokens: int, beginning: int, edges: list[int], codec: Codec
) -> None:
    beginning, (first, last) = min(beginning, tokens), (min(edge, tokens) for edge in edges)
    kv = random_kv(tokens, 64)
    coded = Coded.of(kv, codec, beginning)
    assert torch.equal(everything(coded)[:, :beginning], everything(kv)[:, :beginning])
    whole = everything(coded)
    assert torch.equal(everything(coded.part(first, last)), whole[:, first:last])
    for layer in range(LAYERS):
        keys, values = coded.at(layer, slice(first, last))
        assert torch.equal(keys, whole[2 * layer, first:last])
        assert torch.equal(values, whole[2 * layer + 1, first:last])
    more = Coded.of(random_kv(5, 64, seed=1), codec)
    both = followed(coded, more)
    assert both is not None
    assert torch.equal(everything(both), torch.cat([whole, everything(more)], 1))
    assert both.bytes == coded.bytes + more.bytes


def test_they_take_what_they_say() -> None:
    kv = random_kv(100, 192)
    numbers = 2 * LAYERS * 100 * 192
    assert kv.bytes == 4 * numbers
    assert Coded.of(kv, Codec.INT8).bytes == numbers + numbers // 32 * 2
    assert Coded.of(kv, Codec.INT4).bytes == numbers // 2 + numbers // 32 * 2


def test_what_is_kept_otherwise_is_not_joined() -> None:
    kv = random_kv(3, 64)
    eight, four = Coded.of(kv, Codec.INT8), Coded.of(kv, Codec.INT4)
    assert followed(eight, four) is None
    assert followed(kv, eight) is None
    assert followed(eight, Coded.of(kv, Codec.INT8, beginning=2)) is None
    assert isinstance(followed(kv, kv), KV)


def test_private_kv_is_not_kept_in_four_bits() -> None:
    with pytest.raises(ValueError, match="private: 'int4', expected 'lossless' or 'int8'"):
        Codecs(private=Codec.INT4)
