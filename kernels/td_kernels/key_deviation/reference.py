"""Squares, summed up."""

from __future__ import annotations

import torch


def key_deviation(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """See `td_kernels.key_deviation.key_deviation`."""
    here, there = here.float(), there.float()
    return torch.stack([(here - there).square().sum(-1), there.square().sum(-1)])
