"""Which rows of a group's prompts a pass computes, and where all of them stand in its memory. Pure.

A member's prompt is its own history, whose KV is kept as it is, and **pieces**: runs of tokens that
the canonical sequence has too, whose KV is taken from there where it is not computed. Everything
else is computed. Each run of computed rows is one sequence to the attention kernel, as long as the
prompt up to the run's end: that alone makes it causal in the prompt's own positions.

Each member has whole blocks of its own in the pass's memory, one after the other; the slot of a
token is its place there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from td_serve.types import Piece


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a member's first `tokens` tokens: `history` of them, and the pieces.

    Pieces stand in the prompt's order, after the history, without overlap.
    """

    tokens: int
    history: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Share:
    """One member's part: its blocks begin at `block`, its computed rows are [first, last) of all.

    `cached` are the positions that are taken from the canonical sequence, and `sources` where from.
    """

    block: int
    first: int
    last: int
    cached: list[int]
    sources: list[int]


@dataclass(frozen=True)
class Rows:
    """A group's computed rows, member after member, and where everything is written.

    `positions` and `slots` are those of the rows; `starts` has the first row of each run and one
    more, `lengths` and `tables` its prompt's length up to there and its member's first block.
    """

    block_size: int
    blocks: int
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    @property
    def widest(self) -> int:
        """The most blocks that a run's prompt takes."""
        return max((-(-length // self.block_size) for length in self.lengths), default=0)


def check(extent: Extent, canonical_tokens: int) -> None:
    """Raises ValueError where pieces overlap, or reach beyond the prompt or what they name."""
    end = extent.history
    if not 0 <= extent.history <= extent.tokens:
        raise ValueError(f"history: {extent.history}, expected 0 to {extent.tokens}")
    for piece in extent.pieces:
        if piece.start < end or piece.tokens < 1:
            raise ValueError(f"a piece at {piece.start}, expected one token or more from {end} on")
        end = piece.start + piece.tokens
        if end > extent.tokens:
            raise ValueError(f"a piece up to {end} of {extent.tokens} tokens")
        if not 0 <= piece.source <= canonical_tokens - piece.tokens:
            raise ValueError(f"a piece from {piece.source} on of {canonical_tokens} tokens")


def layout(members: Sequence[Extent], chosen: Sequence[Sequence[bool]], block_size: int) -> Rows:
    """The rows of a group. `chosen` says, for each member, of every canonical token whether it is
    computed anew."""
    blocks = [-(-member.tokens // block_size) for member in members]
    rows = Rows(block_size=block_size, blocks=sum(blocks))
    block = 0
    for member, mask, count in zip(members, chosen, blocks, strict=True):
        rows.shares.append(_place(rows, member, mask, block))
        block += count
    return rows


def _place(rows: Rows, member: Extent, chosen: Sequence[bool], block: int) -> Share:
    """Add a member's rows, its memory beginning at `block`. Mutates `rows`."""
    cached, sources = _cached(member, chosen)
    first = len(rows.positions)
    base = block * rows.block_size
    for start, end in _runs(member, cached):
        rows.positions.extend(range(start, end))
        rows.slots.extend(range(base + start, base + end))
        rows.starts.append(len(rows.positions))
        rows.lengths.append(end)
        rows.tables.append(block)
    return Share(block=block, first=first, last=len(rows.positions), cached=cached, sources=sources)


def _cached(member: Extent, chosen: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Positions taken from the canonical sequence, and where from."""
    cached, sources = [], []
    for piece in member.pieces:
        for offset in range(piece.tokens):
            if not chosen[piece.source + offset]:
                cached.append(piece.start + offset)
                sources.append(piece.source + offset)
    return cached, sources


def _runs(member: Extent, cached: Sequence[int]) -> list[tuple[int, int]]:
    """The computed positions, as runs [start, end)."""
    runs = []
    start = member.history
    for position in [*cached, member.tokens]:
        if position > start:
            runs.append((start, position))
        start = position + 1
    return runs
