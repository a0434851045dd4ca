"""A few rows at a time, from master or patch to the pages; what stays is not computed with.

A plan has what is the same in all layers of a mirror: `td_kernels.restore_pipeline` makes it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from td_kernels.checks import bits
from td_kernels.chunks import chunks
from td_kernels.planes import Planes, Turn
from td_kernels.rotate.cpu import Factors, turn_rows, turning


class Part(NamedTuple):
    """Rows of the master, or of the patch, that are turned, or stay."""

    is_patch: bool
    rows: torch.Tensor
    slots: torch.Tensor
    factors: Factors | None
    """How each of them is turned; None: they stay."""
    neox: bool


def plan(source: torch.Tensor, slots: torch.Tensor, turn: Turn | None) -> list[Part]:
    """All that has a slot, in up to four parts."""
    is_live = slots >= 0
    stays = is_live
    if turn is not None:
        stays = is_live & (turn.to == (-1 if turn.from_ is None else turn.from_))
    parts = []
    for is_patch, rows in ((False, source), (True, -1 - source)):
        is_here = is_live & (rows >= 0)
        (some,) = (is_here & stays).nonzero(as_tuple=True)
        parts.append(Part(is_patch, rows[some], slots[some], None, neox=True))
        if turn is not None:
            (some,) = (is_here & ~stays).nonzero(as_tuple=True)
            from_ = None if turn.from_ is None else turn.from_[some]
            factors = turning(turn.table, turn.to[some], from_)
            parts.append(Part(is_patch, rows[some], slots[some], factors, turn.neox))
    return [part for part in parts if len(part.rows)]


def restore(master: Planes, patch: Planes, parts: list[Part], pages: Planes) -> None:
    """See `td_kernels.fused_restore.fused_restore`."""
    put_keys, put_values = _put(pages.keys), _put(pages.values)
    for part in parts:
        keys, values = (bits(plane) for plane in (patch if part.is_patch else master))
        for some in chunks(keys, len(part.rows)):
            key_rows = keys.index_select(0, part.rows[some])
            if part.factors is not None:
                floats = key_rows.view(pages.keys.dtype)
                turn_rows(floats, part.factors.part(some), part.neox, floats)
            put_keys(part.slots[some], key_rows)
            put_values(part.slots[some], values.index_select(0, part.rows[some]))


def _put(pages: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """What writes rows into slots of the pages."""
    blocks, block_size, heads, size = pages.shape
    if blocks == 1 or pages.stride(0) == block_size * pages.stride(1):
        flat = bits(pages).view(blocks * block_size, heads, size)
        return lambda slots, rows: flat.index_copy_(0, slots, rows)
    paged = bits(pages)
    return lambda slots, rows: paged.index_put_((slots // block_size, slots % block_size), rows)
