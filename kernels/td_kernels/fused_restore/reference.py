"""Gather, patch, turn, scatter: token after token."""

from __future__ import annotations

import torch

from td_kernels.checks import bits
from td_kernels.planes import Planes, Turn
from td_kernels.rotate import reference


def restore(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    turn: Turn | None,
) -> None:
    """See `td_kernels.fused_restore.fused_restore`."""
    block_size = pages.keys.shape[1]
    rows = source.tolist()
    keys, values = (
        torch.stack([old[row] if row >= 0 else new[-1 - row] for row in rows])
        for old, new in (
            (bits(master.keys), bits(patch.keys)),
            (bits(master.values), bits(patch.values)),
        )
    )
    if turn is not None:
        keys = keys.view(pages.keys.dtype)
        turned = torch.empty_like(keys)
        reference.rotate(keys, turn.table, turn.to, turn.from_, turn.neox, turned)
        keys = bits(turned)
    for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
        if slot >= 0:
            bits(pages.keys)[slot // block_size, slot % block_size] = key
            bits(pages.values)[slot // block_size, slot % block_size] = value
