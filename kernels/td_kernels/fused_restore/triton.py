"""A program takes a tile of tokens and heads from where they are to where they go.

What master and patch have is read once and written once; a key is turned on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from td_kernels.checks import FLOATS, bits
from td_kernels.planes import Planes, Turn
from td_kernels.rotate.triton import turned
from td_kernels.tiles import head_tiles


def restore(
    master: Planes,
    patch: Planes,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Planes,
    turn: Turn | None,
) -> None:
    """See `td_kernels.fused_restore.fused_restore`."""
    if pages.keys.dtype not in FLOATS:
        master, patch, pages = (
            Planes(bits(one.keys), bits(one.values)) for one in (master, patch, pages)
        )
    tokens = len(source)
    blocks, block_size, heads, size = pages.keys.shape
    half = 0 if turn is None else turn.table.shape[1] // 2
    source = source.contiguous()
    # What is not turned has no table and no positions; any tensor stands for them.
    table = master.keys if turn is None else turn.table
    to = source if turn is None else turn.to.contiguous()
    from_ = to if turn is None or turn.from_ is None else turn.from_.contiguous()
    tile = head_tiles(heads, triton.next_power_of_2(size) // 2)
    _restore[triton.cdiv(tokens, tile.tokens), triton.cdiv(heads, tile.heads)](
        *(*master, *patch, source, slots.contiguous(), *pages, table, to, from_),
        tokens,
        heads,
        len(master.keys),
        len(patch.keys),
        blocks,
        len(table),
        *(stride for plane in (*master, *patch) for stride in plane.stride()[:2]),
        *pages.keys.stride(),
        *pages.values.stride(),
        table.stride(0),
        # A byte of ones is NaN in both 8-bit formats.
        missing=float("nan") if pages.keys.dtype in FLOATS else 255,
        block_size=block_size,
        size=size,
        half=half,
        neox=turn is None or turn.neox,
        turned_before=turn is not None and turn.from_ is not None,
        tile_tokens=tile.tokens,
        tile_heads=tile.heads,
        tile_size=triton.next_power_of_2(size),
        tile_pairs=triton.next_power_of_2(max(1, half)),
        tile_rest=triton.next_power_of_2(max(1, size - 2 * half)),
    )


@triton.jit
def _restore(
    master_keys,
    master_values,
    patch_keys,
    patch_values,
    source,
    slots,
    key_pages,
    value_pages,
    table,
    to,
    from_,
    tokens,
    heads,
    master_rows,
    patch_rows,
    blocks,
    positions,
    master_key_row,
    master_key_head,
    master_value_row,
    master_value_head,
    patch_key_row,
    patch_key_head,
    patch_value_row,
    patch_value_head,
    key_block,
    key_slot,
    key_head,
    key_element,
    value_block,
    value_slot,
    value_head,
    value_element,
    table_position,
    missing,
    block_size: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    neox: tl.constexpr,
    turned_before: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_size: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_rest: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)[:, None, None]
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)[None, :, None]
    is_token = token < tokens
    # Rows, slots and positions are 64 bits wide, and with them all offsets of tokens.
    row = tl.load(source + token, mask=is_token, other=0)
    slot = tl.load(slots + token, mask=is_token, other=-1)
    block = slot // block_size
    place = slot - block * block_size
    is_live = (slot >= 0) & (block < blocks) & (head < heads)
    patch_row = -1 - row
    is_master = is_live & (row >= 0) & (row < master_rows)
    is_patch = is_live & (row < 0) & (patch_row < patch_rows)

    number = tl.arange(0, tile_size)[None, None, :]
    is_number = number < size
    value = _read(
        master_values + row * master_value_row + head * master_value_head + number,
        patch_values + patch_row * patch_value_row + head * patch_value_head + number,
        is_master & is_number,
        is_patch & is_number,
        missing,
    )
    value_to = value_pages + block * value_block + place * value_slot + head * value_head
    tl.store(value_to + number * value_element, value, mask=is_live & is_number)

    master_from = master_keys + row * master_key_row + head * master_key_head
    patch_from = patch_keys + patch_row * patch_key_row + head * patch_key_head
    key_to = key_pages + block * key_block + place * key_slot + head * key_head
    if half > 0:
        pair = tl.arange(0, tile_pairs)[None, None, :]
        is_pair = pair < half
        first = pair if neox else 2 * pair
        second = first + (half if neox else 1)
        is_old, is_new = is_master & is_pair, is_patch & is_pair
        one = _read(master_from + first, patch_from + first, is_old, is_new, missing)
        other = _read(master_from + second, patch_from + second, is_old, is_new, missing)
        there = tl.load(to + token, mask=is_token, other=-1)
        here = tl.full(there.shape, -1, tl.int64)
        if turned_before:
            here = tl.load(from_ + token, mask=is_token, other=-1)
        one, other = turned(
            one, other, table, positions, table_position, there, here, pair, half, turned_before
        )
        tl.store(key_to + first * key_element, one, mask=is_live & is_pair)
        tl.store(key_to + second * key_element, other, mask=is_live & is_pair)
    if 2 * half < size:
        behind = 2 * half + tl.arange(0, tile_rest)[None, None, :]
        is_rest = behind < size
        left = _read(
            master_from + behind,
            patch_from + behind,
            is_master & is_rest,
            is_patch & is_rest,
            missing,
        )
        tl.store(key_to + behind * key_element, left, mask=is_live & is_rest)


@triton.jit
def _read(
    master,
    patch,
    is_master,
    is_patch,
    missing,
):
    """What is at one place or at the other. Two loads, of which one is left out: of an address that
    is chosen the compiler does not see that its neighbours follow, and each number would be loaded
    by itself."""
    old = tl.load(master, mask=is_master, other=missing)
    new = tl.load(patch, mask=is_patch, other=missing)
    return tl.where(is_master, old, new)
