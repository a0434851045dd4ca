"""The naive way: a mirror as dense as its master, written and read once more than needed.

Each of its steps is as fast as torch or our own `rotate` makes it.
"""

from __future__ import annotations

import torch

from td_kernels.checks import bits
from td_kernels.planes import Planes, Turn
from td_kernels.rotate import rotate


def restore(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    turn: Turn | None,
) -> None:
    """See `td_kernels.fused_restore.dense_restore`."""
    (patched,) = (source < 0).nonzero(as_tuple=True)
    keys, values = (
        _overwritten(old, new, source, patched) for old, new in zip(master, patch, strict=True)
    )
    if turn is not None:
        rotate(keys, turn.table, turn.to, turn.from_, neox=turn.neox, out=keys)
    (live,) = (slots >= 0).nonzero(as_tuple=True)
    if len(live) < len(slots):
        slots, keys, values = slots[live], keys[live], values[live]
    block_size = pages.keys.shape[1]
    places = (slots // block_size, slots % block_size)
    for page, plane in zip(pages, (keys, values), strict=True):
        bits(page).index_put_(places, bits(plane))


def _overwritten(
    old: torch.Tensor, new: torch.Tensor, source: torch.Tensor, patched: torch.Tensor
) -> torch.Tensor:
    """The master laid out as the mirror, what differs written over it."""
    if len(patched) == len(source):
        return new.index_select(0, -1 - source)
    made = bits(old).index_select(0, source.clamp(min=0))
    made.index_copy_(0, patched, bits(new).index_select(0, -1 - source[patched]))
    return made.view(old.dtype)
