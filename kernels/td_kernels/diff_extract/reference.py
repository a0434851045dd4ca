"""Bits, compared."""

from __future__ import annotations

import torch

from td_kernels.checks import bits


def is_changed(plane: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Whether a token's row, [tokens, width], has another bit than its master's: bool, [tokens]."""
    return (bits(plane) != bits(master)).any(1)
