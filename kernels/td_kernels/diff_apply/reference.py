"""Block after block."""

from __future__ import annotations

import torch


def apply(
    planes: list[tuple[torch.Tensor, torch.Tensor]], indices: torch.Tensor, block: int
) -> None:
    """Write each plane's rows into its blocks: see `td_kernels.diff_apply`."""
    for plane, rows in planes:
        for number, index in enumerate(indices.tolist()):
            target = plane[index * block : (index + 1) * block]
            target.copy_(rows[number * block :][: len(target)])
