"""A program compares a tile of tokens, from one end of their rows to the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from td_kernels.checks import bits
from td_kernels.tiles import row_tiles


def is_changed(plane: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """See `td_kernels.diff_extract.reference.is_changed`."""
    tokens, width = plane.shape
    out = torch.empty(tokens, dtype=torch.bool, device=plane.device)
    tile = row_tiles(width)
    _compare[(triton.cdiv(tokens, tile.rows),)](
        bits(plane),
        bits(master),
        out.view(torch.uint8),
        tokens,
        *plane.stride(),
        *master.stride(),
        width=width,
        tile_rows=tile.rows,
        tile_width=tile.width,
    )
    return out


@triton.jit
def _compare(
    plane,
    master,
    out,
    tokens,
    plane_token,
    plane_element,
    master_token,
    master_element,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    is_token = token < tokens
    differs = tl.zeros([tile_rows, tile_width], tl.int32)
    for start in range(0, width, tile_width):
        place = start + tl.arange(0, tile_width)[None, :]
        is_here = is_token[:, None] & (place < width)
        row = token[:, None]
        one = tl.load(plane + row * plane_token + place * plane_element, mask=is_here, other=0)
        other = tl.load(master + row * master_token + place * master_element, mask=is_here, other=0)
        differs |= (one != other).to(tl.int32)
    tl.store(out + token, tl.max(differs, axis=1).to(tl.uint8), mask=is_token)
