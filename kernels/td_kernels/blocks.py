"""Blocks of consecutive tokens, of which the last may be short.

Rows of some blocks are packed: those of the first block come first, and a short block is the last.
"""

from __future__ import annotations

import torch


def block_count(tokens: int, block: int) -> int:
    """How many blocks of `block` tokens there are."""
    return -(-tokens // block)


def block_tokens(indices: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """Which tokens the packed rows of some blocks are, int64, [rows]: of `tokens` tokens in blocks
    of `block`, those in the blocks at `indices`, which ascend. Waits for a CUDA device."""
    if block == 1:
        return indices
    places = indices[:, None] * block + torch.arange(block, device=indices.device)
    return places[places < tokens]


def changed_blocks(is_changed: torch.Tensor, block: int) -> torch.Tensor:
    """The blocks with a changed token, int64 and ascending; `is_changed` is bool, [tokens]. Waits
    for a CUDA device."""
    if block > 1:
        short = -len(is_changed) % block
        is_changed = torch.nn.functional.pad(is_changed, (0, short)).view(-1, block).any(1)
    return is_changed.nonzero().squeeze(1)
