"""A few rows at a time, from master or patch to the pages; what stays is not computed with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from td_kernels.checks import bits
from td_kernels.chunks import chunks
from td_kernels.planes import Planes, Turn
from td_kernels.rotate.cpu import turn, turn_rows


def restore(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    by: Turn | None,
) -> None:
    """See `td_kernels.fused_restore.fused_restore`."""
    is_live = slots >= 0
    stays = is_live if by is None else by.to == (-1 if by.from_ is None else by.from_)
    # Master and patch by themselves, and of each what stays and what is turned: at most four parts.
    for planes, rows in ((master, source), (patch, -1 - source)):
        is_here = is_live & (rows >= 0)
        (staying,) = (is_here & stays).nonzero(as_tuple=True)
        _move(planes, rows[staying], slots[staying], pages, None)
        if by is not None:
            (turned,) = (is_here & ~stays).nonzero(as_tuple=True)
            from_ = None if by.from_ is None else by.from_[turned]
            one = by._replace(to=by.to[turned], from_=from_)
            _move(planes, rows[turned], slots[turned], pages, one)


def _move(
    planes: Planes, rows: torch.Tensor, slots: torch.Tensor, pages: Planes, by: Turn | None
) -> None:
    if not len(rows):
        return
    put_keys, put_values = _put(pages.keys), _put(pages.values)
    keys, values = bits(planes.keys), bits(planes.values)
    factors = None if by is None else turn(by.table, by.to, by.from_)
    for some in chunks(keys, len(rows)):
        key_rows = keys.index_select(0, rows[some])
        if by is not None and factors is not None:
            cos, sin = (factor[some] for factor in factors)
            floats = key_rows.view(pages.keys.dtype)
            turn_rows(floats, cos, sin, by.neox, floats)
        put_keys(slots[some], key_rows)
        put_values(slots[some], values.index_select(0, rows[some]))


def _put(pages: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """What writes rows into slots of the pages."""
    blocks, block_size, heads, size = pages.shape
    if blocks == 1 or pages.stride(0) == block_size * pages.stride(1):
        flat = bits(pages).view(blocks * block_size, heads, size)
        return lambda slots, rows: flat.index_copy_(0, slots, rows)
    paged = bits(pages)
    return lambda slots, rows: paged.index_put_((slots // block_size, slots % block_size), rows)
