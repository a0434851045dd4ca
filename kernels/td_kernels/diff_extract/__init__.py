"""Which blocks of a mirror differ from its master (TokenDance, arXiv 2604.03143, section 4.3).

What is kept of a mirror is the rows of those blocks and one list of their indices for keys and
values together: see `td_kernels.diff_apply`, and `td_kernels.blocks` for how rows are packed.
"""

from __future__ import annotations

import torch

from td_kernels import checks
from td_kernels.blocks import changed_blocks
from td_kernels.dispatch import uses_triton


def diff_extract(
    keys: torch.Tensor,
    values: torch.Tensor,
    master_keys: torch.Tensor,
    master_values: torch.Tensor,
    *,
    block: int,
) -> torch.Tensor:
    """The indices of the blocks of `block` tokens, of which the last may be short, where keys or
    values are not their master's: int64, ascending.

    All are [tokens, width]; values may have another width than keys. Bits are compared: a NaN
    equals the same NaN, and -0.0 is not 0.0. Waits for a CUDA device. Raises ValueError.
    """
    _check("keys", keys, "master_keys", master_keys, block)
    _check("values", values, "master_values", master_values, block)
    checks.shaped("values", values, tokens=len(keys), width=None)
    checks.placed("values", values, keys.device)
    return changed_blocks(
        _is_changed(keys, master_keys) | _is_changed(values, master_values), block
    )


def diff_extract_plane(plane: torch.Tensor, master: torch.Tensor, *, block: int) -> torch.Tensor:
    """The same of keys or values alone."""
    _check("plane", plane, "master", master, block)
    return changed_blocks(_is_changed(plane, master), block)


def _check(
    name: str, plane: torch.Tensor, master_name: str, master: torch.Tensor, block: int
) -> None:
    checks.shaped(name, plane, tokens=None, width=None)
    checks.typed(name, plane, *checks.STORED)
    checks.shaped(master_name, master, tokens=plane.shape[0], width=plane.shape[1])
    checks.same(master_name, master, plane)
    checks.positive("block", block)


def _is_changed(plane: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    if uses_triton(plane) and plane.numel():
        from td_kernels.diff_extract import triton

        with torch.cuda.device_of(plane):
            return triton.is_changed(plane, master)
    from td_kernels.diff_extract import reference

    return reference.is_changed(plane, master)
