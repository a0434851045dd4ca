"""Which members of a round are prefilled by one pass, and what each takes from the others. Pure.

Prompts come cut into segments. Those that several members have, in one order for all, make the
round's canonical sequence. What stands elsewhere in a member's prompt is its own; a member of whose
shared texts most do, or who shares nothing, is served alone.
What all prompts begin with, position for position, is no segment: it stands in everybody's own
history, and in the header of the canonical sequence, so that what is shared was computed after what
it is read after. Every prompt's last segment is its own: what is answered is always computed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from td_serve.authors import Turn, find_written
from td_serve.orders import aligned, one_order
from td_serve.segments import alike, key
from td_serve.types import (
    AgentId,
    Alone,
    Canonical,
    GenerateRequest,
    MemberPass,
    PassSpec,
    Piece,
    RequestId,
    Rule,
    SegmentKey,
    SessionId,
    Span,
)


@dataclass(frozen=True)
class _Segment:
    """Tokens [start, end) of a prompt, by their key."""

    key: SegmentKey
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of a round, and why members that are in none are served alone.

    `histories` has, of every member of whose prompts anything is kept, under which name it is.
    """

    passes: list[PassSpec]
    reasons: dict[RequestId, Alone]
    histories: dict[RequestId, str] = {}

    def of(self, requests: Set[RequestId]) -> Reuse:
        """The same for these requests alone. Whoever is left with nobody is served alone."""
        reasons = {one: why for one, why in self.reasons.items() if one in requests}
        histories = {one: name for one, name in self.histories.items() if one in requests}
        passes = []
        for spec in self.passes:
            members = [one for one in spec.members if one.request_id in requests]
            if len(members) > 1:
                passes.append(msgspec.structs.replace(spec, members=members))
            else:
                reasons.update((one.request_id, Alone.NOBODY_ELSE) for one in members)
        return Reuse(passes=passes, reasons=reasons, histories=histories)


ALL_EXACT = Reuse(passes=[], reasons={})


def plan_reuse(
    sim: SessionId,
    members: Mapping[AgentId, GenerateRequest],
    rule: Rule,
    head: Sequence[int],
    turns: Sequence[Turn] | None = None,
) -> Reuse:
    """One pass for those members that have something in common; `members` in the round's order.

    `head` is what a prompt of the model begins with (a neutral system text, as its template has
    it), for the canonical sequence's own header. Members under different salts never meet. What is
    shared is computed in the canonical sequence, or else taken from the `turns` that put it out:
    what is kept of the one is not taken for the other.
    """
    passes: list[PassSpec] = []
    reasons: dict[RequestId, Alone] = {}
    base = [] if turns is None else ["as written"]
    histories = {
        request.request_id: _history(sim, agent, request, base)
        for agent, request in members.items()
    }
    for group in _by_salt(members, reasons):
        spec = _plan_group(sim, group, rule, head, reasons, histories, turns)
        if spec is not None:
            passes.append(spec)
    return Reuse(
        passes=passes,
        reasons=reasons,
        histories={one: name for one, name in histories.items() if name},
    )


def _history(sim: SessionId, agent: AgentId, request: GenerateRequest, base: Sequence[str]) -> str:
    """Under which name a member's history is kept: nobody else's, no other salt's, and no other
    base's. Empty where none shall be: the request is to leave nothing behind, or to be exact."""
    membership = request.membership
    if membership is not None and (membership.exact or not membership.kept):
        return ""
    return key((sim, request.cache_salt or "", agent, *base), [])


def _by_salt(
    members: Mapping[AgentId, GenerateRequest], reasons: dict[RequestId, Alone]
) -> list[dict[AgentId, GenerateRequest]]:
    """Members that may share KV. Mutates `reasons`: adds those who may with nobody."""
    groups: dict[str | None, dict[AgentId, GenerateRequest]] = {}
    for agent, request in members.items():
        if request.membership is not None and request.membership.exact:
            reasons[request.request_id] = Alone.ASKED_FOR
        elif not request.cuts:
            reasons[request.request_id] = Alone.ONE_SEGMENT
        elif not request.hand_over or request.n > 1:
            reasons[request.request_id] = Alone.COMPUTED_WHERE_DECODED
        else:
            groups.setdefault(request.cache_salt, {})[agent] = request
    return list(groups.values())


def _plan_group(
    sim: SessionId,
    group: Mapping[AgentId, GenerateRequest],
    rule: Rule,
    head: Sequence[int],
    reasons: dict[RequestId, Alone],
    histories: Mapping[RequestId, str],
    turns: Sequence[Turn] | None,
) -> PassSpec | None:
    prompts = {agent: segments(one.prompt_token_ids, one.cuts) for agent, one in group.items()}
    begin = _common_beginning(list(prompts.values()))
    # The last one is what is answered.
    inner = {agent: found[begin:-1] for agent, found in prompts.items()}
    counts = Counter(one for found in inner.values() for one in {part.key for part in found})
    some = {
        agent: [part for part in found if counts[part.key] > 1] for agent, found in inner.items()
    }
    tokens = {part.key: part.tokens for found in some.values() for part in found}
    keys = {agent: [part.key for part in found] for agent, found in some.items()}
    order = one_order(keys.values(), tokens)
    fitting: dict[AgentId, list[tuple[_Segment, int]]] = {}
    for agent, request in group.items():
        places = aligned(keys[agent], order, tokens)
        parts = [
            (part, place)
            for part, place in zip(some[agent], places, strict=True)
            if place is not None
        ]
        if not some[agent]:
            reasons[request.request_id] = Alone.NOTHING_SHARED
        elif 2 * _tokens(part for part, _ in parts) < _tokens(some[agent]):
            reasons[request.request_id] = Alone.OTHER_ORDER
        else:
            fitting[agent] = parts
    if len(fitting) < 2:
        reasons.update((group[agent].request_id, Alone.NOBODY_ELSE) for agent in fitting)
        return None
    texts = {
        place: group[agent].prompt_token_ids[part.start : part.end]
        for agent, parts in fitting.items()
        for part, place in parts
    }
    first = next(iter(fitting))
    salt = group[first].cache_salt
    scope = [sim, salt or "", *([] if turns is None else ["as written"])]
    common = group[first].prompt_token_ids[: prompts[first][begin].start]
    common = common[alike(head, common) :]  # both begin as the template does
    named = sorted(texts)
    canonical = _canonical(scope, [*head, *common], [texts[place] for place in named])
    sources = dict(zip(named, canonical.segments, strict=True))
    return PassSpec(
        canonical=canonical,
        rule=rule,
        members=[
            _member(histories[group[agent].request_id], rule, group[agent], parts, sources)
            for agent, parts in fitting.items()
        ],
        written=find_written(canonical.token_ids, turns or (), salt),
    )


def segments(tokens: Sequence[int], cuts: Sequence[int]) -> list[_Segment]:
    """A prompt's segments, cut before each of `cuts`; empty ones are none."""
    edges = sorted({0, len(tokens), *cuts})
    return [
        _Segment(key((), tokens[start:end]), start, end) for start, end in itertools.pairwise(edges)
    ]


def _common_beginning(prompts: Sequence[Sequence[_Segment]]) -> int:
    """With how many segments all of them begin; never all of a prompt's."""
    count = 0
    for same in zip(*prompts, strict=False):
        if len({segment.key for segment in same}) > 1:
            break
        count += 1
    return min([count, *(len(prompt) - 1 for prompt in prompts)])


def _tokens(parts: Iterable[_Segment]) -> int:
    return sum(part.tokens for part in parts)


def _canonical(
    scope: Sequence[str], header: list[int], texts: Sequence[Sequence[int]]
) -> Canonical:
    """The sequence; its name is its header's, so that what follows may grow from round to round."""
    tokens = list(header)
    spans = []
    for text in texts:
        spans.append(Span(start=len(tokens), tokens=len(text)))
        tokens += text
    return Canonical(key=key(scope, header), token_ids=tokens, segments=spans)


def _member(
    history: str,
    rule: Rule,
    request: GenerateRequest,
    parts: Sequence[tuple[_Segment, int]],
    sources: Mapping[int, Span],
) -> MemberPass:
    end = parts[-1][0].end
    return MemberPass(
        request_id=request.request_id,
        history=history,
        token_ids=request.prompt_token_ids[:end],
        asked=request.prompt_token_ids[end:] if rule.weighed else [],
        pieces=[
            Piece(start=part.start, tokens=part.tokens, source=sources[place].start)
            for part, place in parts
        ],
    )
