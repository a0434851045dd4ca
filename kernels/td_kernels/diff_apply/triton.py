"""A program copies a tile of packed rows; where keys and values go together, of both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from td_kernels.checks import bits
from td_kernels.tiles import row_tiles


def apply(
    planes: list[tuple[torch.Tensor, torch.Tensor]], indices: torch.Tensor, block: int
) -> None:
    """See `td_kernels.diff_apply.reference.apply`."""
    (plane, rows), (other, other_rows) = planes[0], planes[-1]
    widest = max(plane.shape[1], other.shape[1])
    if not len(rows) or not widest:
        return
    tile = row_tiles(widest)
    _apply[triton.cdiv(len(rows), tile.rows), triton.cdiv(widest, tile.width)](
        bits(plane),
        bits(rows),
        bits(other),
        bits(other_rows),
        indices.contiguous(),
        len(rows),
        len(plane),
        plane.shape[1],
        other.shape[1],
        *plane.stride(),
        *rows.stride(),
        *other.stride(),
        *other_rows.stride(),
        block=block,
        is_pair=len(planes) == 2,
        tile_rows=tile.rows,
        tile_width=tile.width,
    )


@triton.jit
def _apply(
    plane,
    rows,
    other,
    other_rows,
    indices,
    count,
    tokens,
    width,
    other_width,
    plane_token,
    plane_element,
    rows_row,
    rows_element,
    other_token,
    other_element,
    other_rows_row,
    other_rows_element,
    block: tl.constexpr,
    is_pair: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    index = tl.load(indices + row // block, mask=row < count, other=-1)
    token = (index * block + row % block)[:, None]
    is_row = (row < count)[:, None] & (index >= 0)[:, None] & (token < tokens)
    source = row.to(tl.int64)[:, None]
    place = tl.program_id(1) * tile_width + tl.arange(0, tile_width)[None, :]
    is_here = is_row & (place < width)
    read = tl.load(rows + source * rows_row + place * rows_element, mask=is_here)
    tl.store(plane + token * plane_token + place * plane_element, read, mask=is_here)
    if is_pair:
        is_here = is_row & (place < other_width)
        read = tl.load(
            other_rows + source * other_rows_row + place * other_rows_element, mask=is_here
        )
        tl.store(other + token * other_token + place * other_element, read, mask=is_here)
