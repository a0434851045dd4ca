"""A program turns a tile of tokens and heads; cosines and sines are read once for all its heads.

Numbers are read once and written once: on CUDA this is bound by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from td_kernels.tiles import head_tiles


def rotate(
    keys: torch.Tensor,
    table: torch.Tensor,
    to: torch.Tensor,
    from_: torch.Tensor | None,
    neox: bool,
    out: torch.Tensor,
) -> None:
    """See `td_kernels.rotate.rotate`."""
    tokens, heads, size = keys.shape
    half = table.shape[1] // 2
    tile = head_tiles(heads, half)
    to = to.contiguous()
    _rotate[triton.cdiv(tokens, tile.tokens), triton.cdiv(heads, tile.heads)](
        keys,
        out,
        table,
        to,
        to if from_ is None else from_.contiguous(),
        tokens,
        heads,
        len(table),
        *keys.stride(),
        *out.stride(),
        table.stride(0),
        half=half,
        rest=0 if out is keys else size - 2 * half,
        neox=neox,
        turned_before=from_ is not None,
        tile_tokens=tile.tokens,
        tile_heads=tile.heads,
        tile_pairs=triton.next_power_of_2(half),
        tile_rest=triton.next_power_of_2(max(1, size - 2 * half)),
    )


@triton.jit
def _rotate(
    keys,
    out,
    table,
    to,
    from_,
    tokens,
    heads,
    positions,
    key_token,
    key_head,
    key_element,
    out_token,
    out_head,
    out_element,
    table_position,
    half: tl.constexpr,
    rest: tl.constexpr,
    neox: tl.constexpr,
    turned_before: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_rest: tl.constexpr,
):
    # Tokens may be far apart in memory: their offsets are 64 bits wide, all others 32.
    token = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)[:, None, None]
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)[None, :, None]
    pair = tl.arange(0, tile_pairs)[None, None, :]
    is_row = (token < tokens) & (head < heads)
    is_pair = is_row & (pair < half)
    first = pair if neox else 2 * pair
    second = first + (half if neox else 1)
    source = keys + token * key_token + head * key_head
    target = out + token * out_token + head * out_head
    one = tl.load(source + first * key_element, mask=is_pair, other=0)
    other = tl.load(source + second * key_element, mask=is_pair, other=0)

    there = tl.load(to + token, mask=token < tokens, other=-1)
    here = tl.full(there.shape, -1, tl.int64)
    if turned_before:
        here = tl.load(from_ + token, mask=token < tokens, other=-1)
    one, other = turned(
        one, other, table, positions, table_position, there, here, pair, half, turned_before
    )
    tl.store(target + first * out_element, one, mask=is_pair)
    tl.store(target + second * out_element, other, mask=is_pair)
    if rest > 0:
        behind = tl.arange(0, tile_rest)[None, None, :]
        is_rest = is_row & (behind < rest)
        left = tl.load(source + (2 * half + behind) * key_element, mask=is_rest, other=0)
        tl.store(target + (2 * half + behind) * out_element, left, mask=is_rest)


@triton.jit
def turned(
    one,
    other,
    table,
    positions,
    table_position,
    there,
    here,
    pair,
    half: tl.constexpr,
    turned_before: tl.constexpr,
):
    """The two numbers of each pair, [tokens, heads, pairs], turned from `here` to `there`, both
    [tokens, 1, 1]. Where the table has no such position they become NaN."""
    stays = there == here
    is_turn = (pair < half) & (there != here)
    cos, sin = _cos_sin(table, positions, table_position, there, pair, half, is_turn)
    if turned_before:
        cos_here, sin_here = _cos_sin(table, positions, table_position, here, pair, half, is_turn)
        square = cos_here * cos_here + sin_here * sin_here
        cos, sin = (
            (cos * cos_here + sin * sin_here) / square,
            (sin * cos_here - cos * sin_here) / square,
        )
    one_wide = one.to(tl.float32)
    other_wide = other.to(tl.float32)
    turned_one = one_wide * cos - other_wide * sin
    turned_other = other_wide * cos + one_wide * sin
    return (
        tl.where(stays, one, turned_one.to(one.dtype)),
        tl.where(stays, other, turned_other.to(other.dtype)),
    )


@triton.jit
def _cos_sin(
    table,
    positions,
    table_position,
    position,
    pair,
    half: tl.constexpr,
    is_turn,
):
    """What the table has, [tokens, 1, pairs], float32; no turn at -1."""
    is_known = is_turn & (position >= 0) & (position < positions)
    place = table + position * table_position + pair
    cos = tl.load(place, mask=is_known, other=float("nan")).to(tl.float32)
    sin = tl.load(place + half, mask=is_known, other=float("nan")).to(tl.float32)
    return tl.where(position < 0, 1.0, cos), tl.where(position < 0, 0.0, sin)
