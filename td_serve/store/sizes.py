"""What a family of mirrors takes, in bytes, beside what as many dense caches would.

Everything that is held counts where it is held; what several hold counts once, with the master.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from td_serve.store.families import Mirror

BLOCK = 32
"""Tokens of a block, where blocks are counted (TokenDance, section 6.4)."""
_ENTRY = 8
"""Bytes of a token's number, a position, a block's number."""


class MirrorSize(msgspec.Struct, frozen=True, kw_only=True):
    """A mirror of `tokens` tokens, of which `shared` are its canonical sequence's; in bytes what it
    takes itself: `references` into that, `diffs` of what was computed anew of the shared texts,
    `private` KV, and what says which tokens those are (`index`).

    `blocks` of 32 tokens have any shared ones, and in `blocks_changed` one of these is not what the
    master has. As dense copy of one member with what blocks of the others differ by (the paper's
    layout) it would take `block_sparse`, and `block_sparse_shared` of its shared tokens alone.
    """

    tokens: int
    shared: int
    dense: int
    references: int
    diffs: int
    private: int
    index: int
    blocks: int
    blocks_changed: int
    block_sparse: int
    block_sparse_shared: int


class FamilySize(msgspec.Struct, frozen=True, kw_only=True):
    """All mirrors of a round, and the `master`, what they share; in bytes."""

    master: int
    mirrors: list[MirrorSize]


def family_size(mirrors: Sequence[Mirror], kv_bytes: int) -> FamilySize:
    """What some mirrors take; `kv_bytes` is a token's KV as the engine has it."""
    masters = {id(one.canonical.kv): one.canonical.kv.bytes for one in mirrors}
    taken = [_taken(one) for one in mirrors]
    # The member that has most of what others have, too, is the paper's master.
    first = max(range(len(mirrors)), key=lambda number: len(taken[number]), default=0)
    sizes = [_size(one, taken[first] if mirrors else set(), kv_bytes) for one in mirrors]
    if mirrors:
        dense = sizes[first].dense
        sizes[first] = msgspec.structs.replace(
            sizes[first], block_sparse=dense, block_sparse_shared=sizes[first].shared * kv_bytes
        )
    return FamilySize(master=sum(masters.values()), mirrors=sizes)


def _taken(mirror: Mirror) -> set[int]:
    """What a mirror has of its canonical sequence as it is there."""
    return set(mirror.sources.tolist())


def _size(mirror: Mirror, master: set[int], kv_bytes: int) -> MirrorSize:
    diffs = [rows for rows in mirror.own if rows.sources is not None]
    private = [rows for rows in mirror.own if rows.sources is None]
    changed: dict[int, bool] = {}
    """By position, of what is shared: whether it is not what the master has."""
    for position, source in zip(mirror.cached.tolist(), mirror.sources.tolist(), strict=True):
        changed[position] = source not in master
    for rows in diffs:
        changed.update(dict.fromkeys(rows.positions.tolist(), True))
    blocks = {position // BLOCK for position in changed}
    blocks_changed = {position // BLOCK for position, is_changed in changed.items() if is_changed}
    tokens = len(mirror.token_ids)
    of_blocks = sum(min(BLOCK, tokens - BLOCK * block) for block in blocks_changed) * kv_bytes
    own = {position // BLOCK for position in range(tokens) if position not in changed}
    whole = sum(min(BLOCK, tokens - BLOCK * block) for block in own | blocks_changed) * kv_bytes
    return MirrorSize(
        tokens=tokens,
        shared=len(changed),
        dense=tokens * kv_bytes,
        references=(len(mirror.cached) + len(mirror.sources)) * _ENTRY,
        diffs=sum(rows.kv.bytes for rows in diffs),
        private=mirror.history.kv.bytes + sum(rows.kv.bytes for rows in private),
        index=_ENTRY
        * (
            tokens
            + sum(len(rows.positions) for rows in mirror.own)
            + sum(len(rows.positions) for rows in diffs)
        ),
        blocks=len(blocks),
        blocks_changed=len(blocks_changed),
        block_sparse=whole + _ENTRY * len(own | blocks_changed),
        block_sparse_shared=of_blocks + _ENTRY * len(blocks_changed),
    )
