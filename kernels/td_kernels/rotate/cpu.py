"""One turn by the difference, a few rows at a time; what stays is not computed with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from td_kernels.chunks import chunks
from td_kernels.rotate.reference import pairs


class Factors(NamedTuple):
    """The turns that lead from one position to another, each as a cosine and a sine of its own:
    float32, [tokens, 1, rotary size / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def part(self, some: slice) -> Factors:
        return Factors(self.cos[some], self.sin[some])


def rotate(
    keys: torch.Tensor,
    table: torch.Tensor,
    to: torch.Tensor,
    from_: torch.Tensor | None,
    neox: bool,
    out: torch.Tensor,
) -> None:
    """See `td_kernels.rotate.rotate`."""
    stays = to == (-1 if from_ is None else from_)
    if not stays.any():
        factors = turning(table, to, from_)
        for some in chunks(keys):
            turn_rows(keys[some], factors.part(some), neox, out[some])
        return
    if out is not keys:
        out.copy_(keys)
    (turned,) = (~stays).nonzero(as_tuple=True)
    factors = turning(table, to[turned], None if from_ is None else from_[turned])
    for some in chunks(keys, len(turned)):
        rows = keys.index_select(0, turned[some])
        turn_rows(rows, factors.part(some), neox, rows)
        out.index_copy_(0, turned[some], rows)


def turning(table: torch.Tensor, to: torch.Tensor, from_: torch.Tensor | None) -> Factors:
    """What turns keys from `from_` to `to`."""
    cos, sin = _cos_sin(table, to)
    if from_ is None or bool((from_ < 0).all()):
        return Factors(cos, sin)
    cos_from, sin_from = _cos_sin(table, from_)
    square = cos_from.square().addcmul_(sin_from, sin_from)
    return Factors(
        (cos * cos_from).addcmul_(sin, sin_from).div_(square),
        (sin * cos_from).addcmul_(cos, sin_from, value=-1).div_(square),
    )


def turn_rows(keys: torch.Tensor, by: Factors, neox: bool, out: torch.Tensor) -> None:
    """Write `keys`, turned so, into `out`, which may be the same memory."""
    rotary = 2 * by.cos.shape[-1]
    first, second = pairs(keys.float(), rotary, neox)
    turned_first = (first * by.cos).addcmul_(second, by.sin, value=-1)
    turned_second = (second * by.cos).addcmul_(first, by.sin)
    to_first, to_second = pairs(out, rotary, neox)
    to_first.copy_(turned_first)
    to_second.copy_(turned_second)
    if rotary < keys.shape[-1]:
        out[..., rotary:].copy_(keys[..., rotary:])


def _cos_sin(table: torch.Tensor, positions: torch.Tensor) -> Factors:
    """What the table has at positions; no turn at -1."""
    rows = table.index_select(0, positions.clamp(min=0)).float()[:, None]
    cos, sin = rows.chunk(2, -1)
    before = positions < 0
    if before.any():
        cos[before], sin[before] = 1, 0
    return Factors(cos, sin)
