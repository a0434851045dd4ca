"""Write a mirror's blocks over its master's (TokenDance, arXiv 2604.03143, sections 4.3 and 5: one
kernel for a plane, one for keys and values together)."""

from __future__ import annotations

import torch

from td_kernels import checks
from td_kernels.blocks import block_count
from td_kernels.dispatch import uses_triton


def diff_apply(
    plane: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, *, block: int
) -> None:
    """Write `rows`, [rows, width], into the blocks at `indices` of `plane`, [tokens, width].

    A block has `block` tokens, the last one as many as there are. `indices` are int64 and ascend;
    rows are packed (`td_kernels.blocks`). Raises ValueError; where indices neither ascend nor
    exist, on a CPU alone: on CUDA, what stands behind the last token is not written.
    """
    _check_indices(indices, plane, block)
    _check("plane", plane, "rows", rows, indices, block)
    _apply([(plane, rows)], indices, block)


def diff_apply_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    *,
    block: int,
) -> None:
    """The same for keys and values with one list of indices; their widths may differ."""
    _check_indices(indices, keys, block)
    _check("keys", keys, "key_rows", key_rows, indices, block)
    _check("values", values, "value_rows", value_rows, indices, block)
    checks.shaped("values", values, tokens=len(keys), width=None)
    checks.shaped("value_rows", value_rows, rows=len(key_rows), width=values.shape[1])
    checks.same("values", values, keys)
    _apply([(keys, key_rows), (values, value_rows)], indices, block)


def _check_indices(indices: torch.Tensor, plane: torch.Tensor, block: int) -> None:
    checks.positive("block", block)
    checks.indices("indices", indices, None, plane.device, blocks=None)
    checks.within("indices", indices, 0, block_count(len(plane), block) - 1)
    if not indices.is_cuda and bool((indices.diff() <= 0).any()):
        raise ValueError("indices do not ascend; expected each block once, in order")


def _check(
    name: str,
    plane: torch.Tensor,
    rows_name: str,
    rows: torch.Tensor,
    indices: torch.Tensor,
    block: int,
) -> None:
    checks.shaped(name, plane, tokens=None, width=None)
    checks.typed(name, plane, *checks.STORED)
    checks.shaped(rows_name, rows, rows=None, width=plane.shape[1])
    checks.same(rows_name, rows, plane)
    whole = len(indices) * block
    short = whole - -len(plane) % block
    # Which of the two it is, the last index says; on CUDA that would wait for the device.
    expected = {whole, short} if len(indices) else {0}
    if len(indices) and not indices.is_cuda:
        is_short = int(indices[-1]) == block_count(len(plane), block) - 1
        expected = {short if is_short else whole}
    if len(rows) not in expected:
        numbers = " or ".join(map(str, sorted(expected)))
        raise ValueError(
            f"{rows_name} has {len(rows)} rows; expected {numbers}, for {len(indices)} blocks of"
            f" {block} out of {len(plane)} tokens"
        )


def _apply(
    planes: list[tuple[torch.Tensor, torch.Tensor]], indices: torch.Tensor, block: int
) -> None:
    if not len(indices):
        return
    if uses_triton(indices):
        from td_kernels.diff_apply import triton

        with torch.cuda.device_of(indices):
            triton.apply(planes, indices, block)
    else:
        from td_kernels.diff_apply import cpu

        cpu.apply(planes, indices, block)
