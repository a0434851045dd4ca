"""What of a canonical sequence was put out in earlier turns, whose KV is kept. Pure.

The tokens of an output are looked for in the sequence as they were sampled. Where its text was
tokenised anew, some at its edges may be others, merged with what stands around: what is the same
between them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from td_serve.quotes import EDGE, SHORTEST
from td_serve.types import GenerateRequest, Handle, LeaseId, Piece, Written

_KEY = 8
"""First tokens by which outputs are looked up: enough that few places begin so."""


@dataclass(frozen=True)
class Turn:
    """A turn that has put out `token_ids` behind its prompt's `start` tokens. Its lease keeps KV
    of what it has put out as far as its first `kept` tokens go, prompt included, for requests under
    the same `salt`."""

    lease: LeaseId
    salt: str | None
    start: int
    token_ids: Sequence[int]
    kept: int


@dataclass(frozen=True)
class Kept:
    """A turn whose KV is kept, and where."""

    handle: Handle
    turn: Turn

    @classmethod
    def of(cls, request: GenerateRequest, token_ids: Sequence[int], handle: Handle) -> Kept:
        """The turn in which `request` was answered with these tokens."""
        start = len(request.prompt_token_ids)
        turn = Turn(handle.lease, request.cache_salt, start, token_ids, handle.tokens)
        return cls(handle, turn)


def find_written(tokens: Sequence[int], turns: Sequence[Turn], salt: str | None) -> list[Written]:
    """The parts of `tokens` that turns under `salt` have put out, in order and without overlap.

    Of several turns that have put out the same the first counts.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for at in range(len(tokens) - _KEY + 1):
        places.setdefault(tuple(tokens[at : at + _KEY]), []).append(at)
    found: dict[int, Written] = {}
    for turn in turns:
        if turn.salt != salt:
            continue
        core = turn.token_ids[EDGE : len(turn.token_ids) - EDGE]
        if len(core) < SHORTEST:
            continue
        end = list(core[-_KEY:])
        for at in places.get(tuple(core[:_KEY]), ()):
            # Their ends first: what goes round in circles begins alike wherever one looks.
            if list(tokens[at + len(core) - _KEY : at + len(core)]) != end:
                continue
            if list(tokens[at : at + len(core)]) == list(core):
                written = _whole(tokens, turn, at)
                if written.piece.tokens > 0:
                    found.setdefault(written.piece.source, written)
    return _apart([found[at] for at in sorted(found)])


def _whole(tokens: Sequence[int], turn: Turn, at: int) -> Written:
    """The output whose core stands at `at`, with as much of its edges as is the same there, and of
    which KV is kept."""
    first, last = EDGE, len(turn.token_ids) - EDGE
    offset = at - first
    while first > 0 and first + offset > 0 and _same(tokens, turn, first - 1, offset):
        first -= 1
    while last < len(turn.token_ids) and _same(tokens, turn, last, offset):
        last += 1
    last = max(first, min(last, turn.kept - turn.start))
    piece = Piece(start=turn.start + first, tokens=last - first, source=first + offset)
    return Written(name=turn.lease, piece=piece)


def _same(tokens: Sequence[int], turn: Turn, place: int, offset: int) -> bool:
    at = place + offset
    return at < len(tokens) and tokens[at] == turn.token_ids[place]


def _apart(found: Sequence[Written]) -> list[Written]:
    """Those that begin where the one before has ended, or later."""
    apart: list[Written] = []
    end = 0
    for one in found:
        if one.piece.source >= end:
            apart.append(one)
            end = one.piece.source + one.piece.tokens
    return apart
