"""What belongs together in one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Planes(NamedTuple):
    """Keys and values: of the same shape, dtype and device."""

    keys: torch.Tensor
    values: torch.Tensor


class Turn(NamedTuple):
    """Which positions a layer's keys are turned to: arguments of `td_kernels.rotate`."""

    table: torch.Tensor
    to: torch.Tensor
    from_: torch.Tensor | None = None
    neox: bool = True
