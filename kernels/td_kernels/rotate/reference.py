"""Keys turned back to before rotation, then to where they are to stand."""

from __future__ import annotations

import torch


def rotate(
    keys: torch.Tensor,
    table: torch.Tensor,
    to: torch.Tensor,
    from_: torch.Tensor | None,
    neox: bool,
    out: torch.Tensor,
) -> None:
    """See `td_kernels.rotate.rotate`."""
    if from_ is None:
        from_ = torch.full_like(to, -1)
    rotary = table.shape[1]
    first, second = pairs(keys.float(), rotary, neox)
    # The inverse of a scaled turn is its transpose, divided by the scale's square.
    cos, sin = cos_sin(table, from_)
    square = cos.square() + sin.square()
    first, second = (
        (first * cos + second * sin) / square,
        (second * cos - first * sin) / square,
    )
    cos, sin = cos_sin(table, to)
    turned = keys.clone()
    turned_first, turned_second = pairs(turned, rotary, neox)
    turned_first.copy_(first * cos - second * sin)
    turned_second.copy_(second * cos + first * sin)
    stays = (to == from_)[:, None, None]
    out.copy_(torch.where(stays, keys, turned))


def cos_sin(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at these positions, float32, each [tokens, 1, rotary size / 2]; at -1 those
    of no turn at all."""
    cos, sin = table[positions.clamp(min=0)].float()[:, None].chunk(2, -1)
    before = (positions < 0)[:, None, None]
    return cos.masked_fill(before, 1), sin.masked_fill(before, 0)


def pairs(keys: torch.Tensor, rotary: int, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and of the second number of each pair, [tokens, heads, rotary / 2]."""
    if neox:
        return keys[..., : rotary // 2], keys[..., rotary // 2 : rotary]
    return keys[..., 0:rotary:2], keys[..., 1:rotary:2]
