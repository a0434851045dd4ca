"""The members of a pass as it is computed: what of each is kept, and what is computed anew."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from td_serve.engine.collective import Group
from td_serve.rows import Extent, Rows, layout
from td_serve.store.families import History
from td_serve.store.kv import KV
from td_serve.types import MemberPass, Piece, Span


@dataclass(frozen=True)
class Part:
    """One member's: with `history_tokens` of `history` its prompt begins; `chosen` are the shared
    tokens that it computes all the same, as a mask over the canonical sequence; `left` is how far
    the others deviate, if that is known (see `PassTokens`)."""

    member: MemberPass
    history: History
    history_tokens: int
    chosen: Sequence[bool]
    left: float | None = None

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """What it shares behind its history."""
        behind = []
        for piece in self.member.pieces:
            known = max(0, self.history_tokens - piece.start)
            if known < piece.tokens:
                start, source = piece.start + known, piece.source + known
                behind.append(Piece(start=start, tokens=piece.tokens - known, source=source))
        return behind

    @property
    def spans(self) -> list[Span]:
        """Its pieces as they stand in the canonical sequence."""
        return [Span(start=one.source, tokens=one.tokens) for one in self.pieces]

    @property
    def behind(self) -> int:
        """How many tokens of its own are computed behind the first that it shares, which may stand
        in its history."""
        first = max(private(self.member), self.history_tokens)
        shared = sum(piece.tokens for piece in self.pieces)
        return len(self.member.token_ids) - first - shared

    @property
    def extent(self) -> Extent:
        return Extent(
            tokens=len(self.member.token_ids), history=self.history_tokens, pieces=self.pieces
        )

    def rows(self) -> int:
        """How many of its rows are computed."""
        reused = sum(
            piece.tokens - sum(self.chosen[piece.source : piece.source + piece.tokens])
            for piece in self.pieces
        )
        return len(self.member.token_ids) - self.history_tokens - reused


def private(member: MemberPass) -> int:
    """How many tokens stand before a member's first piece."""
    return member.pieces[0].start if member.pieces else len(member.token_ids)


class Limits(NamedTuple):
    """What is computed at once: `rows` at most, of prompts of `tokens` tokens together, which all
    have a place in scratch memory. One member alone may have more."""

    rows: int
    tokens: int


def batches(parts: Sequence[Part], limits: Limits) -> Iterator[list[Part]]:
    """The parts in order, in batches within the limits."""
    batch: list[Part] = []
    rows = tokens = 0
    for part in parts:
        more, length = part.rows(), len(part.member.token_ids)
        if batch and (rows + more > limits.rows or tokens + length > limits.tokens):
            yield batch
            batch, rows, tokens = [], 0, 0
        batch.append(part)
        rows += more
        tokens += length
    if batch:
        yield batch


def group_of(
    batch: Sequence[Part], canonical: KV, block_size: int, until: int | None = None
) -> Group:
    """What a pass computes of some members; `until` as in `Group`."""
    rows = layout([part.extent for part in batch], [part.chosen for part in batch], block_size)
    return Group(
        rows,
        row_ids(rows, [part.member.token_ids for part in batch]),
        canonical,
        [(part.history, part.history_tokens) for part in batch],
        until=until,
    )


def row_ids(rows: Rows, prompts: Sequence[Sequence[int]]) -> list[int]:
    """The rows' tokens."""
    return [
        prompt[position]
        for prompt, share in zip(prompts, rows.shares, strict=True)
        for position in rows.positions[share.first : share.last]
    ]
