"""All rows at once."""

from __future__ import annotations

import torch

from td_kernels.blocks import block_tokens
from td_kernels.checks import bits


def apply(
    planes: list[tuple[torch.Tensor, torch.Tensor]], indices: torch.Tensor, block: int
) -> None:
    """See `td_kernels.diff_apply.reference.apply`."""
    places = block_tokens(indices, len(planes[0][0]), block)
    for plane, rows in planes:
        bits(plane).index_copy_(0, places, bits(rows))
