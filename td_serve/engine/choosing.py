"""Which shared tokens the members of a pass compute anew, by the rule of its plan.

A rule that goes by deviations has a check layer: up to there all shared tokens are computed in a
member's own context. For a choice of the whole group's those members do, in order, who have
something shared that nobody before them has; for choices of their own, every one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import torch

from td_serve.engine.collective import KV, run_pass
from td_serve.engine.model import LayeredModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.parts import Part, batches, group_of
from td_serve.pic.base import Recovery, Shared, left
from td_serve.pic.rules import recovery
from td_serve.types import MemberPass, Rule


class Chooser:
    """Chooses for members of passes on one engine."""

    def __init__(self, model: LayeredModel, attention: PagedAttention, most_rows: int) -> None:
        self._model = model
        self._attention = attention
        self._most_rows = most_rows

    def choose(
        self, rule: Rule, parts: Sequence[Part], canonical: KV, shared: Shared
    ) -> Generator[None, None, list[Part]]:
        """The parts with what they compute anew, without those for whom it would be too much; what
        they had chosen before does not count."""
        named = recovery(rule, self._attention.block_size)
        layer = named.check_layer(self._model.layers)
        if layer is None:
            return _choosing(named, ((part, shared) for part in parts))
        if rule.own:
            found = yield from self._deviations(parts, canonical, layer, shared.tokens)
            return _choosing(
                named,
                (
                    (part, Shared(shared.tokens, part.spans, one.tolist()))
                    for part, one in zip(parts, found, strict=True)
                ),
            )
        some = _covering(parts)
        found = yield from self._deviations(some, canonical, layer, shared.tokens)
        has = torch.stack([_has(part.member, shared.tokens) for part in some])
        mean = torch.stack(found).sum(0) / has.sum(0).clamp(min=1)
        seen = replace(shared, deviations=mean.tolist())
        return _choosing(named, ((part, seen) for part in parts))

    def _deviations(
        self, parts: Sequence[Part], canonical: KV, layer: int, tokens: int
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Of each part, [tokens]: see `Shared`; 0 for what the member does not have."""
        everything = [replace(part, chosen=[True] * tokens) for part in parts]
        found = []
        for batch in batches(everything, self._most_rows):
            group = group_of(batch, canonical, self._attention.block_size, until=layer)
            computed = yield from run_pass(self._model, self._attention, group)
            (keys,) = computed.kv.keys
            for part, share in zip(batch, group.rows.shares, strict=True):
                # All but the history is computed, so that rows follow one another.
                own = keys[share.first : share.last]
                deviations = torch.zeros(tokens)
                for piece in part.member.pieces:
                    first = piece.start - part.history_tokens
                    here = own[first : first + piece.tokens]
                    there = canonical.keys[layer][piece.source : piece.source + piece.tokens]
                    far, length = self._model.summed(
                        torch.stack([(here - there), there]).float().square().sum(-1)
                    )
                    deviations[piece.source : piece.source + piece.tokens] = far / length
                found.append(deviations)
        return found


def _choosing(rule: Recovery, seen: Iterable[tuple[Part, Shared]]) -> list[Part]:
    """The parts with what the rule chooses of what each has seen, without those that it leaves
    out. What several have seen is chosen from once."""
    choices: dict[int, tuple[Shared, Sequence[bool] | None]] = {}
    made = []
    for part, shared in seen:
        if id(shared) not in choices:
            choices[id(shared)] = (shared, rule.chosen(shared))
        _, chosen = choices[id(shared)]
        if chosen is not None:
            made.append(replace(part, chosen=chosen, left=left(shared, chosen)))
    return made


def _covering(parts: Sequence[Part]) -> list[Part]:
    """Members, in order, of whom each has something shared that those before it have not."""
    seen: set[int] = set()
    some = []
    for part in parts:
        pieces = {piece.source for piece in part.member.pieces}
        if not pieces <= seen:
            some.append(part)
            seen |= pieces
    return some


def _has(member: MemberPass, tokens: int) -> torch.Tensor:
    """[tokens], true where the member has that token of the canonical sequence."""
    has = torch.zeros(tokens, dtype=torch.bool)
    for piece in member.pieces:
        has[piece.source : piece.source + piece.tokens] = True
    return has
