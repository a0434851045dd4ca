"""The naive way: a mirror as dense as its master, written and read once more than needed.

Each of its steps is as fast as torch or our own `rotate` makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from td_kernels.checks import bits
from td_kernels.planes import Planes, Turn
from td_kernels.rotate import rotate


class Plan(NamedTuple):
    """Where a mirror's rows come from and where they go: the same in all layers."""

    master_rows: torch.Tensor
    """A row of the master for each token; any for those of the patch."""
    patched: torch.Tensor
    """Which tokens are the patch's,"""
    patch_rows: torch.Tensor
    """and which of its rows they are."""
    live: torch.Tensor | None
    """Which tokens have a slot; None: all."""
    block: torch.Tensor
    place: torch.Tensor


def plan(source: torch.Tensor, slots: torch.Tensor, block_size: int) -> Plan:
    """Waits for a CUDA device."""
    (patched,) = (source < 0).nonzero(as_tuple=True)
    (live,) = (slots >= 0).nonzero(as_tuple=True)
    if len(live) < len(slots):
        slots = slots[live]
    return Plan(
        master_rows=source.clamp(min=0),
        patched=patched,
        patch_rows=-1 - source[patched],
        live=live if len(live) < len(source) else None,
        block=slots // block_size,
        place=slots % block_size,
    )


def restore(master: Planes, patch: Planes, by: Plan, pages: Planes, turn: Turn | None) -> None:
    """See `td_kernels.fused_restore.dense_restore`."""
    keys, values = (_overwritten(old, new, by) for old, new in zip(master, patch, strict=True))
    if turn is not None:
        rotate(keys, turn.table, turn.to, turn.from_, neox=turn.neox, out=keys)
    for page, plane in zip(pages, (keys, values), strict=True):
        rows = bits(plane) if by.live is None else bits(plane)[by.live]
        bits(page).index_put_((by.block, by.place), rows)


def _overwritten(old: torch.Tensor, new: torch.Tensor, by: Plan) -> torch.Tensor:
    """The master laid out as the mirror, what differs written over it."""
    if len(by.patched) == len(by.master_rows):
        return bits(new).index_select(0, by.patch_rows).view(new.dtype)
    made = bits(old).index_select(0, by.master_rows)
    made.index_copy_(0, by.patched, bits(new).index_select(0, by.patch_rows))
    return made.view(old.dtype)
