"""Every operation of td_kernels against its reference: part of `gpu_check.py`.

Outputs are filled with NaN before, so that what is not written is seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from restore_bench import rotary_table

from td_kernels.blocks import block_tokens
from td_kernels.checks import FLOATS, bits
from td_kernels.diff_apply import diff_apply_kv
from td_kernels.diff_apply import reference as apply_reference
from td_kernels.diff_extract import diff_extract, diff_extract_plane
from td_kernels.fused_restore import dense_restore, fused_restore
from td_kernels.fused_restore import reference as restore_reference
from td_kernels.key_deviation import key_deviation
from td_kernels.key_deviation import reference as deviation_reference
from td_kernels.planes import Planes, Turn
from td_kernels.rotate import reference as rotate_reference
from td_kernels.rotate import rotate

BLOCK = 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative, and of numbers of about the size of all: a few units in the last place."""


def parity(device: str, sizes: list[tuple[int, int, int]]) -> Iterator[tuple[str, str]]:
    """Names of what agrees with its reference, and for what; raises AssertionError with the first
    that does not. Sizes are [tokens, heads, size]."""
    for dtype in FLOATS:
        for tokens, heads, size in sizes:
            what = f"{str(dtype)[6:]}, {tokens} × {heads} × {size}"
            for name, check in (
                ("rotate", _rotate),
                ("key_deviation", _deviation),
                ("diff_extract, diff_apply_kv", _diff),
                ("fused_restore, dense_restore", _restore),
            ):
                check(device, dtype, tokens, heads, size)
                yield name, what


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _turn(tokens: int, size: int, neox: bool) -> Turn:
    table = rotary_table(4 * tokens + 8, size - size // 4 // 2 * 2) * 1.1
    to, from_ = (torch.randint(-1, len(table), (tokens,)) for _ in range(2))
    from_[::3] = to[::3]
    return Turn(table, to, from_, neox)


def _there(turn: Turn, device: str) -> Turn:
    assert turn.from_ is not None, "a turn is made with both"
    return Turn(turn.table.to(device), turn.to.to(device), turn.from_.to(device), turn.neox)


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, scale: float) -> None:
    error = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu(), wanted, rtol=error, atol=error * scale, equal_nan=True)


def _rotate(device: str, dtype: torch.dtype, tokens: int, heads: int, size: int) -> None:
    for neox in (True, False):
        keys, turn = _random(tokens, heads, size, dtype=dtype), _turn(tokens, size, neox)
        wanted = torch.full_like(keys, torch.nan)
        rotate_reference.rotate(keys, turn.table, turn.to, turn.from_, neox, wanted)
        here, there = keys.to(device), _there(turn, device)
        out = torch.full_like(here, torch.nan)
        for target in (out, here):
            rotate(here, there.table, there.to, there.from_, neox=neox, out=target)
            _close(target, wanted, dtype, 8)


def _deviation(device: str, dtype: torch.dtype, tokens: int, heads: int, size: int) -> None:
    here, there = (_random(tokens, heads * size, dtype=dtype) for _ in range(2))
    wanted = deviation_reference.key_deviation(here, there)
    _close(key_deviation(here.to(device), there.to(device)), wanted, torch.float32, heads * size)


def _diff(device: str, dtype: torch.dtype, tokens: int, heads: int, size: int) -> None:
    master = [_random(tokens, heads * size, dtype=dtype) for _ in range(2)]
    mirror = [plane.clone() for plane in master]
    for token in range(0, tokens, 5 * BLOCK):
        bits(mirror[token % 2])[token, -1] ^= 1
    changed = torch.arange(0, -(-tokens // BLOCK), 5)
    there = [plane.to(device) for plane in (*mirror, *master)]
    found = diff_extract(*there, block=BLOCK)
    assert found.tolist() == changed.tolist(), "diff_extract finds other blocks"
    assert diff_extract_plane(there[0], there[0], block=BLOCK).numel() == 0
    rows = [plane[block_tokens(changed, tokens, BLOCK)] for plane in mirror]
    wanted = [torch.full_like(plane, torch.nan) for plane in master]
    apply_reference.apply(list(zip(wanted, rows, strict=True)), changed, BLOCK)
    made = [torch.full_like(plane, torch.nan) for plane in there[2:]]
    diff_apply_kv(*made, found, *(some.to(device) for some in rows), block=BLOCK)
    for one, other in zip(made, wanted, strict=True):
        assert torch.equal(bits(one.cpu()), bits(other)), "diff_apply_kv writes other rows"


def _restore(device: str, dtype: torch.dtype, tokens: int, heads: int, size: int) -> None:
    master, patch = (
        Planes(*(_random(rows, heads, size, dtype=dtype) for _ in range(2)))
        for rows in (tokens + 1, tokens // 6 + 1)
    )
    source = torch.randint(-len(patch.keys), len(master.keys), (tokens,))
    blocks = tokens // 16 + 2
    slots = torch.randperm(16 * blocks)[:tokens]
    slots[::7] = -1
    turn = _turn(tokens, size, neox=True)
    wanted = Planes(*(torch.full((blocks, 16, heads, size), torch.nan).to(dtype) for _ in "kv"))
    restore_reference.restore(master, patch, source, slots, wanted, turn)
    here = [Planes(*(plane.to(device) for plane in planes)) for planes in (master, patch)]
    for restore in (fused_restore, dense_restore):
        # Head by head, as one of vLLM's layouts.
        memory = torch.full((blocks, 2, heads, 16, size), torch.nan).to(device, dtype)
        pages = Planes(memory[:, 0].transpose(1, 2), memory[:, 1].transpose(1, 2))
        restore(*here, source.to(device), slots.to(device), pages, _there(turn, device))
        _close(pages.keys, wanted.keys, dtype, 8)
        assert torch.equal(bits(pages.values.cpu()), bits(wanted.values)), "other values"
