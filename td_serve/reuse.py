"""Which members of a round are prefilled by one pass, and what each takes from the others. Pure.

Prompts come cut into segments. Those that several members have, in one order for all, make the
round's canonical sequence; a member whose order is another, or who shares nothing, is served alone.
What all prompts begin with, position for position, is no segment: it stands in everybody's own
history, and in the header of the canonical sequence, so that what is shared was computed after what
it is read after. Every prompt's last segment is its own: what is answered is always computed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from td_serve.authors import Turn, find_written
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


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of a round, and why members that are in none are served alone.

    `histories` has, of every member, the name under which what its prompts begin with is kept.
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
    return Reuse(passes=passes, reasons=reasons, histories=histories)


def _history(sim: SessionId, agent: AgentId, request: GenerateRequest, base: Sequence[str]) -> str:
    """Under which name a member's history is kept: nobody else's, no other salt's, and no other
    base's."""
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
    shared = {one for one, count in counts.items() if count > 1}
    order = _one_order(inner, shared)
    place = {one: number for number, one in enumerate(order)}
    fitting = {}
    for agent, request in group.items():
        parts = _first_of_each(inner[agent], shared)
        places = [place[part.key] for part in parts]
        if not parts:
            reasons[request.request_id] = Alone.NOTHING_SHARED
        elif places != sorted(places):
            reasons[request.request_id] = Alone.OTHER_ORDER
        else:
            fitting[agent] = parts
    if len(fitting) < 2:
        reasons.update((group[agent].request_id, Alone.NOBODY_ELSE) for agent in fitting)
        return None
    texts = {
        part.key: group[agent].prompt_token_ids[part.start : part.end]
        for agent, parts in fitting.items()
        for part in parts
    }
    first = next(iter(fitting))
    salt = group[first].cache_salt
    scope = [sim, salt or "", *([] if turns is None else ["as written"])]
    common = group[first].prompt_token_ids[: prompts[first][begin].start]
    common = common[alike(head, common) :]  # both begin as the template does
    named = [one for one in order if one in texts]
    canonical = _canonical(scope, [*head, *common], [texts[one] for one in named])
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


def _one_order(
    inner: Mapping[AgentId, Sequence[_Segment]], shared: set[SegmentKey]
) -> list[SegmentKey]:
    """One order of the shared segments: that of most members, then what others have more.

    What a member has more than those before it comes after what it stands behind there.
    """
    orders = Counter(
        tuple(part.key for part in _first_of_each(found, shared)) for found in inner.values()
    )
    after: dict[SegmentKey | None, SegmentKey | None] = {None: None}  # from the beginning on
    # Of as many the one that says more, then the first member's.
    for found in sorted(orders, key=lambda one: (-orders[one], -len(one))):
        before: SegmentKey | None = None
        for one in found:
            if one not in after:
                after[one], after[before] = after[before], one
            before = one
    order: list[SegmentKey] = []
    while (following := after[order[-1] if order else None]) is not None:
        order.append(following)
    return order


def _first_of_each(found: Sequence[_Segment], shared: set[SegmentKey]) -> list[_Segment]:
    """A member's shared segments; of one that stands there twice the first."""
    parts: dict[SegmentKey, _Segment] = {}
    for part in found:
        if part.key in shared:
            parts.setdefault(part.key, part)
    return list(parts.values())


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
    parts: Sequence[_Segment],
    sources: Mapping[SegmentKey, Span],
) -> MemberPass:
    return MemberPass(
        request_id=request.request_id,
        history=history,
        token_ids=request.prompt_token_ids[: parts[-1].end],
        asked=request.prompt_token_ids[parts[-1].end :] if rule.weighed else [],
        pieces=[
            Piece(start=part.start, tokens=part.end - part.start, source=sources[part.key].start)
            for part in parts
        ],
    )
