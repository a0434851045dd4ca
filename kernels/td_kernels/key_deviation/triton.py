"""A program sums up a tile of tokens, from one end of their rows to the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from td_kernels.tiles import row_tiles


def key_deviation(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """See `td_kernels.key_deviation.key_deviation`."""
    tokens, width = here.shape
    out = here.new_empty(2, tokens, dtype=torch.float32)
    tile = row_tiles(width)
    _deviation[(triton.cdiv(tokens, tile.rows),)](
        here,
        there,
        out,
        tokens,
        *here.stride(),
        *there.stride(),
        width=width,
        tile_rows=tile.rows,
        tile_width=tile.width,
    )
    return out


@triton.jit
def _deviation(
    here,
    there,
    out,
    tokens,
    here_token,
    here_element,
    there_token,
    there_element,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    is_token = token < tokens
    far = tl.zeros([tile_rows, tile_width], tl.float32)
    length = tl.zeros([tile_rows, tile_width], tl.float32)
    for start in range(0, width, tile_width):
        place = start + tl.arange(0, tile_width)[None, :]
        is_here = is_token[:, None] & (place < width)
        row = token[:, None]
        at = tl.load(here + row * here_token + place * here_element, mask=is_here, other=0)
        by = tl.load(there + row * there_token + place * there_element, mask=is_here, other=0)
        wide = by.to(tl.float32)
        apart = at.to(tl.float32) - wide
        far += apart * apart
        length += wide * wide
    tl.store(out + token, tl.sum(far, axis=1), mask=is_token)
    tl.store(out + tokens + token, tl.sum(length, axis=1), mask=is_token)
