"""Which shared tokens the members of a pass compute anew, by the rule of its plan.

A rule that goes by deviations has a check layer: up to there all shared tokens behind a member's
history are computed in its own context. For a choice of the whole group's a few members do
who together have all of it; for choices of their own, every one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from td_serve.engine.collective import Computed, run_pass
from td_serve.engine.model import LayeredModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.parts import Limits, Part, batches, group_of
from td_serve.pic.base import Recovery, Shared, left
from td_serve.pic.rules import recovery
from td_serve.rows import Share
from td_serve.store.kv import KV
from td_serve.types import Piece, Rule, Span

_ASKED = 128
"""At most so many of the last tokens of a prompt say what is attended to."""


class Chooser:
    """Chooses for members of passes on one engine."""

    def __init__(self, model: LayeredModel, attention: PagedAttention, limits: Limits) -> None:
        self._model = model
        self._attention = attention
        self._limits = limits

    def choose(
        self, rule: Rule, parts: Sequence[Part], canonical: KV, shared: Shared
    ) -> Generator[None, None, list[Part]]:
        """The parts with what they compute anew, without those for whom it would be too much; what
        they had chosen before does not count."""
        named = recovery(rule, self._attention.block_size)
        layer = named.check_layer(self._model.layers)
        some = [part for part in parts if part.pieces]
        if layer is None or not some:
            return _choosing(named, parts, shared)
        if rule.own:
            found = yield from self._see(rule, some, canonical, layer, shared.tokens)
            chosen = [part for part in parts if not part.pieces]
            for part, seen in zip(some, found, strict=True):
                chosen += _choosing(named, [part], _as_seen(shared, part.spans, seen))
            return chosen
        some = _covering(some)
        found = yield from self._see(rule, some, canonical, layer, shared.tokens)
        has = torch.stack([_has(part, shared.tokens) for part in some])
        mean = torch.stack(found).sum(0) / has.sum(0).clamp(min=1)
        return _choosing(named, parts, _as_seen(shared, shared.segments, mean))

    def _see(
        self, rule: Rule, parts: Sequence[Part], canonical: KV, layer: int, tokens: int
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Of each part, [2, tokens]: deviations, and scores (see `Shared`); 0 for what the member
        does not have."""
        everything = [replace(_whole(part, rule), chosen=[True] * tokens) for part in parts]
        found = []
        for batch in batches(everything, self._limits):
            group = group_of(batch, canonical, self._attention.block_size, until=layer)
            computed = yield from run_pass(self._model, self._attention, group)
            for part, share in zip(batch, group.rows.shares, strict=True):
                seen = _Seen.of(self._model, computed, share, part, layer, rule.weighed)
                found.append(self._score(rule, seen, canonical, tokens))
                yield
        return found

    def _score(self, rule: Rule, seen: _Seen, canonical: KV, tokens: int) -> torch.Tensor:
        made = torch.zeros(2, tokens)
        weights = self._weights(seen) if rule.weighed and seen.asked else None
        for piece in seen.pieces:
            first = piece.start - seen.history_tokens
            here = seen.keys[first : first + piece.tokens]
            source = slice(piece.source, piece.source + piece.tokens)
            there = canonical.keys[seen.layer][source]
            far, length = self._model.summed(
                torch.stack([(here - there), there]).float().square().sum(-1)
            )
            made[:, source] = far / length
            if weights is not None:
                made[1, source] *= weights[piece.start : piece.start + piece.tokens].sqrt()
        return made

    def _weights(self, seen: _Seen) -> torch.Tensor:
        """How much what is asked attends to each of a prompt's tokens, of the mean of all that are
        shared, [tokens]."""
        positions = torch.arange(len(seen.keys)) + seen.history_tokens
        query, keys = self._model.rotate(
            seen.layer, positions, seen.queries.clone(), seen.keys.clone()
        )
        assert keys is not None, "a rotation gives back what it was given"
        attended = self._model.summed(
            self._attention.attended(
                seen.layer, query[-min(seen.asked, _ASKED) :], torch.cat([seen.history, keys])
            )
        )
        shared = torch.cat([attended[one.start : one.start + one.tokens] for one in seen.pieces])
        return attended / shared.mean()


@dataclass(frozen=True)
class _Seen:
    """What has been computed of a member at a layer: its rows' queries and keys before rotation,
    behind the rotated keys of its history; its last rows are what is asked."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    history: torch.Tensor
    history_tokens: int
    pieces: list[Piece]
    asked: int

    @classmethod
    def of(
        cls,
        model: LayeredModel,
        computed: Computed,
        share: Share,
        part: Part,
        layer: int,
        with_history: bool,
    ) -> _Seen:
        """All but the history is computed, so that rows follow one another."""
        assert computed.queries is not None, "a pass until a layer has them"
        (keys,) = computed.kv.keys
        history = keys.new_empty(part.history_tokens if with_history else 0, keys.shape[1])
        for known in part.history.parts(model, layer, 0, len(history)):
            history[known.positions] = known.keys
        return cls(
            layer=layer,
            queries=computed.queries[share.first : share.last],
            keys=keys[share.first : share.last],
            history=history,
            history_tokens=part.history_tokens,
            pieces=part.pieces,
            asked=len(part.member.asked),
        )


def _whole(part: Part, rule: Rule) -> Part:
    """The member with its whole prompt, where a rule goes by what is asked."""
    if not rule.weighed:
        return part
    member = part.member
    tokens = [*member.token_ids, *member.asked]
    return replace(part, member=msgspec.structs.replace(member, token_ids=tokens))


def _as_seen(shared: Shared, segments: Sequence[Span], seen: torch.Tensor) -> Shared:
    """What is shared of these segments, with what has been seen of it (see `Chooser._see`)."""
    deviations, scores = seen.tolist()
    return replace(shared, segments=segments, deviations=deviations, scores=scores)


def _choosing(rule: Recovery, parts: Sequence[Part], shared: Shared) -> list[Part]:
    """The parts with what the rule chooses for all of them; none where it leaves them out."""
    chosen = rule.chosen(shared)
    if chosen is None:
        return []
    return [replace(part, chosen=chosen, left=left(shared, chosen)) for part in parts]


def _covering(parts: Sequence[Part]) -> list[Part]:
    """Few members who together have all that is shared: those with most of it come first, each has
    something that those before it have not."""
    seen: set[int] = set()
    some = []
    for part in sorted(parts, key=lambda part: -sum(piece.tokens for piece in part.pieces)):
        places = set(Shared(0, part.spans).places())
        if not places <= seen:
            some.append(part)
            seen |= places
    return some


def _has(part: Part, tokens: int) -> torch.Tensor:
    """[tokens], true where the member has that token of the canonical sequence."""
    has = torch.zeros(tokens, dtype=torch.bool)
    for piece in part.pieces:
        has[piece.source : piece.source + piece.tokens] = True
    return has
