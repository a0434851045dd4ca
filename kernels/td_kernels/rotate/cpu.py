"""One turn by the difference, a few rows at a time; what stays is not computed with."""

from __future__ import annotations

import torch

from td_kernels.chunks import chunks
from td_kernels.rotate.reference import cos_sin, pairs


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
        cos, sin = turn(table, to, from_)
        for some in chunks(keys):
            turn_rows(keys[some], cos[some], sin[some], neox, out[some])
        return
    if out is not keys:
        out.copy_(keys)
    (turned,) = (~stays).nonzero(as_tuple=True)
    if not len(turned):
        return
    cos, sin = turn(table, to[turned], None if from_ is None else from_[turned])
    for some in chunks(keys, len(turned)):
        rows = keys.index_select(0, turned[some])
        turn_rows(rows, cos[some], sin[some], neox, rows)
        out.index_copy_(0, turned[some], rows)


def turn(
    table: torch.Tensor, to: torch.Tensor, from_: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The turn that leads from one position to another, as a cosine and a sine of its own, float32,
    each [tokens, 1, rotary size / 2]."""
    cos, sin = cos_sin(table, to)
    if from_ is None or bool((from_ < 0).all()):
        return cos, sin
    cos_from, sin_from = cos_sin(table, from_)
    square = cos_from.square().addcmul_(sin_from, sin_from)
    cos_by = (cos * cos_from).addcmul_(sin, sin_from).div_(square)
    sin_by = (sin * cos_from).addcmul_(cos, sin_from, value=-1).div_(square)
    return cos_by, sin_by


def turn_rows(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool, out: torch.Tensor
) -> None:
    """Write `keys`, turned so, into `out`, which may be the same memory."""
    rotary = 2 * cos.shape[-1]
    first, second = pairs(keys.float(), rotary, neox)
    turned_first = (first * cos).addcmul_(second, sin, value=-1)
    turned_second = (second * cos).addcmul_(first, sin)
    to_first, to_second = pairs(out, rotary, neox)
    to_first.copy_(turned_first)
    to_second.copy_(turned_second)
    if rotary < keys.shape[-1]:
        out[..., rotary:].copy_(keys[..., rotary:])
