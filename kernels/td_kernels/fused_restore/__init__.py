"""One layer of a mirror, from its master and its patch into paged memory, in one pass (TokenDance,
arXiv 2604.03143, section 4.4 and algorithm 1).

The mirror never stands anywhere but in the pages. `dense_restore` is the naive way to the same:
what the fused one is measured against.
"""

from __future__ import annotations

import torch

from td_kernels import checks
from td_kernels.dispatch import uses_triton
from td_kernels.planes import Planes, Turn
from td_kernels.rotate import check_turn


def fused_restore(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    turn: Turn | None = None,
) -> None:
    """Write one layer of a mirror's tokens into `pages`.

    Token t is row `source[t]` of the master or, where that is negative, row `-1 - source[t]` of the
    patch. Its key is turned from `turn.from_[t]` to `turn.to[t]` as `td_kernels.rotate` does;
    without a turn all keys stand where they are to stand. Both go to `slots[t]`, which is block *
    block size + place in the block; what has a negative slot is left out. Of tokens with the same
    slot any may win. Tokens of several mirrors of one master can be restored together.

    Master and patch are [rows, heads, size]; `source` and `slots` int64, [tokens]; pages are views
    [blocks, block size, heads, size] with any strides, which share no memory with the rest. All
    keys and values are of one dtype; 8-bit floats can be moved, not turned.

    Raises ValueError. What is out of range is found on a CPU alone; on CUDA, rows that do not exist
    become NaN, and slots that do not exist are left out.
    """
    check(master, patch, source, slots, pages, turn)
    if not len(source) or not pages.keys.numel():
        return
    if uses_triton(pages.keys):
        from td_kernels.fused_restore import triton

        with torch.cuda.device_of(pages.keys):
            triton.restore(master, patch, source, slots, pages, turn)
    else:
        from td_kernels.fused_restore import cpu

        cpu.restore(master, patch, cpu.plan(source, slots, turn), pages)


def dense_restore(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    turn: Turn | None = None,
) -> None:
    """The same by way of a mirror in memory of its own: the whole master copied, what differs
    written over it, all of it turned and then written into the pages."""
    check(master, patch, source, slots, pages, turn)
    if len(source) and pages.keys.numel():
        from td_kernels.fused_restore import dense

        by = dense.plan(source, slots, pages.keys.shape[1])
        dense.restore(master, patch, by, pages, turn)


def check(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    turn: Turn | None,
) -> None:
    """Raises ValueError unless this layer of a mirror can be restored so."""
    like = pages.keys
    checks.shaped("pages.keys", like, blocks=None, block_size=None, heads=None, size=None)
    checks.typed("pages.keys", like, *checks.STORED)
    blocks, block_size, heads, size = like.shape
    shape = {"blocks": blocks, "block_size": block_size, "heads": heads, "size": size}
    checks.shaped("pages.values", pages.values, **shape)
    checks.same("pages.values", pages.values, like)
    for name, planes in (("master", master), ("patch", patch)):
        checks.shaped(f"{name}.keys", planes.keys, rows=None, heads=heads, size=size)
        rows = len(planes.keys)
        checks.shaped(f"{name}.values", planes.values, rows=rows, heads=heads, size=size)
        for part, plane in zip(planes._fields, planes, strict=True):
            checks.same(f"{name}.{part}", plane, like)
            checks.packed(f"{name}.{part}", plane)
    checks.indices("source", source, None, like.device)
    checks.within("source", source, -len(patch.keys), len(master.keys) - 1)
    checks.indices("slots", slots, len(source), like.device)
    if slots.numel() and not slots.is_cuda:
        checks.within("slots", slots, min(-1, int(slots.min())), blocks * block_size - 1)
    if turn is not None:
        check_turn(
            "pages.keys",
            like,
            turn.table,
            turn.to,
            turn.from_,
            tokens=len(source),
            prefix="turn.",
        )
