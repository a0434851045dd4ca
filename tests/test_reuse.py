"""Plans: one order for all, nothing reused that is not the same, everybody served."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.reuse import Reuse, plan_reuse
from td_serve.rows import Extent, check
from td_serve.types import (
    AgentId,
    Alone,
    GenerateRequest,
    Membership,
    PassSpec,
    RequestId,
    Rule,
    RuleName,
    SessionId,
)

RULE = Rule(name=RuleName.NONE)
WEIGHED = Rule(name=RuleName.HKVD, weighed=True)
HEAD = [1, 2, 3]
EXACT = Membership(sim=SessionId("sim"), agent=AgentId("exact"), exact=True)


def request(agent: str, *segments: list[int], **fields: Any) -> GenerateRequest:
    tokens = [token for segment in segments for token in segment]
    edges = list(itertools.accumulate(len(segment) for segment in segments))
    cuts = sorted({edge for edge in edges if 0 < edge < len(tokens)})
    return GenerateRequest(
        request_id=RequestId(agent), prompt_token_ids=tokens, sampling=b"", cuts=cuts, **fields
    )


def plan(*requests: GenerateRequest, rule: Rule = RULE) -> Reuse:
    members = {AgentId(one.request_id): one for one in requests}
    return plan_reuse(SessionId("sim"), members, rule, HEAD)


A, B, C = [11, 12], [21, 22, 23], [31]
ADA, BO, CYD = [101], [102, 103], [104]


def test_what_all_share_is_one_sequence_and_each_has_it_at_its_own_place() -> None:
    reuse = plan(request("ada", ADA, A, B, [201]), request("bo", BO, A, B, [202]))
    (spec,) = reuse.passes
    assert spec.canonical.token_ids == [*HEAD, *A, *B]
    starts = {part.request_id: [piece.start for piece in part.pieces] for part in spec.members}
    assert starts == {"ada": [1, 3], "bo": [2, 4]}
    assert [part.token_ids for part in spec.members] == [[*ADA, *A, *B], [*BO, *A, *B]]
    assert [part.asked for part in spec.members] == [[], []]
    (spec,) = plan(
        request("ada", ADA, A, B, [201]), request("bo", BO, A, B, [202], [203]), rule=WEIGHED
    ).passes
    assert [part.asked for part in spec.members] == [[201], [202, 203]]
    assert not reuse.reasons


def test_every_member_has_a_history_of_its_own_whether_it_is_in_a_pass_or_not() -> None:
    """The same one in every round, and another under another salt."""
    members = request("ada", ADA, A, [201]), request("bo", BO, A, [202]), request("cyd", CYD)
    reuse = plan(*members)
    assert set(reuse.histories) == {"ada", "bo", "cyd"}
    assert len(set(reuse.histories.values())) == 3
    (spec,) = reuse.passes
    assert {one.request_id: one.history for one in spec.members} == {
        name: reuse.histories[RequestId(name)] for name in ("ada", "bo")
    }
    assert plan(members[2]).histories == {"cyd": reuse.histories[RequestId("cyd")]}
    assert reuse.of({RequestId("cyd")}).histories.keys() == {"cyd"}
    (other,) = plan(request("cyd", CYD, cache_salt="salt")).histories.values()
    assert other not in reuse.histories.values()


@pytest.mark.parametrize("what", [{"kept": False}, {"exact": True}], ids=["unkept", "exact"])
def test_of_who_is_to_leave_nothing_behind_no_history_is_kept(what: dict[str, bool]) -> None:
    place = Membership(sim=SessionId("sim"), agent=AgentId("cyd"), **what)
    reuse = plan(
        request("ada", ADA, A, B, [201]),
        request("bo", BO, A, B, [202]),
        request("cyd", CYD, A, B, [203], membership=place),
    )
    assert set(reuse.histories) == {"ada", "bo"}
    (spec,) = reuse.passes
    named = {part.request_id: bool(part.history) for part in spec.members}
    assert named == {"ada": True, "bo": True, **({} if "exact" in what else {"cyd": False})}


def test_what_all_begin_with_stands_in_the_header_and_is_no_segment() -> None:
    preamble = [9, 9]
    reuse = plan(request("ada", preamble, ADA, A, [201]), request("bo", preamble, BO, A, [202]))
    (spec,) = reuse.passes
    assert spec.canonical.token_ids == [*HEAD, *preamble, *A]
    assert [len(part.pieces) for part in spec.members] == [1, 1]


def test_what_the_template_begins_with_stands_in_the_header_once() -> None:
    reuse = plan(
        request("ada", HEAD[:2], [9], ADA, A, [201]), request("bo", HEAD[:2], [9], BO, A, [202])
    )
    (spec,) = reuse.passes
    assert spec.canonical.token_ids == [*HEAD, 9, *A]


def test_own_words_may_be_left_out() -> None:
    """Each reads all but what it said itself."""
    reuse = plan(
        request("ada", ADA, B, C, [201]),
        request("bo", BO, A, C, [202]),
        request("cyd", CYD, A, B, [203]),
    )
    (spec,) = reuse.passes
    assert len(spec.members) == 3
    assert spec.canonical.token_ids[len(HEAD) :] == [*A, *B, *C]


def test_what_stands_elsewhere_is_computed() -> None:
    reuse = plan(
        request("ada", ADA, A, B, [201]),
        request("bo", BO, A, B, [202]),
        request("cyd", CYD, B, A, [203]),
    )
    (spec,) = reuse.passes
    (cyd,) = [part for part in spec.members if part.request_id == "cyd"]
    assert cyd.token_ids == [*CYD, *B], "the longer of the two; what follows is not in order"
    assert [piece.source for piece in cyd.pieces] == [len([*HEAD, *A])]


def test_whose_texts_mostly_stand_elsewhere_is_served_alone() -> None:
    texts = [[10 * number, 10 * number + 1] for number in range(1, 6)]
    reuse = plan(
        request("ada", ADA, *texts, [201]),
        request("bo", BO, *texts, [202]),
        request("cyd", CYD, *reversed(texts), [203]),
    )
    (spec,) = reuse.passes
    assert [part.request_id for part in spec.members] == ["ada", "bo"]
    assert reuse.reasons == {"cyd": Alone.OTHER_ORDER}


def test_what_is_said_again_is_shared_again() -> None:
    reuse = plan(
        request("ada", ADA, A, B, [9], A, C, [201]), request("bo", BO, A, B, [8], A, C, [202])
    )
    (spec,) = reuse.passes
    assert spec.canonical.token_ids == [*HEAD, *A, *B, *A, *C]
    assert [len(part.pieces) for part in spec.members] == [4, 4]


def test_what_is_answered_is_never_reused() -> None:
    task = [7, 7, 7]
    reuse = plan(request("ada", ADA, A, task), request("bo", BO, A, task))
    (spec,) = reuse.passes
    assert all(part.token_ids[-len(A) :] == A for part in spec.members)


def test_members_that_cannot_share_say_why() -> None:
    reuse = plan(
        request("whole"),
        request("scored", ADA, A, [1], hand_over=False),
        request("many", ADA, A, [1], n=2),
        request("alone", CYD, C, [2]),
        request("other", BO, A, [3], cache_salt="other"),
        request("exact", BO, A, [3], membership=EXACT),
    )
    assert reuse.passes == []
    assert reuse.reasons == {
        "whole": Alone.ONE_SEGMENT,
        "scored": Alone.COMPUTED_WHERE_DECODED,
        "many": Alone.COMPUTED_WHERE_DECODED,
        "alone": Alone.NOTHING_SHARED,
        "other": Alone.NOTHING_SHARED,
        "exact": Alone.ASKED_FOR,
    }


def test_another_salt_is_another_group() -> None:
    reuse = plan(
        request("ada", ADA, A, [1], cache_salt="x"),
        request("bo", BO, A, [2], cache_salt="x"),
        request("cyd", CYD, A, [3], cache_salt="y"),
        request("dan", [105], A, [4], cache_salt="y"),
    )
    first, second = reuse.passes
    assert first.canonical.key != second.canonical.key
    assert first.canonical.token_ids == second.canonical.token_ids


def test_an_empty_round_has_no_pass() -> None:
    assert plan() == Reuse(passes=[], reasons={})


segments = st.lists(
    st.sampled_from([(1,), (2, 3), (4, 5, 6), (7,), (8, 8)]).map(list), min_size=1, max_size=6
)
rounds = st.lists(segments, min_size=1, max_size=5)


@given(rounds)
def test_whatever_is_reused_is_the_same_tokens_and_everybody_is_accounted_for(
    prompts: list[list[list[int]]],
) -> None:
    requests = [request(f"agent {number}", *prompt) for number, prompt in enumerate(prompts)]
    reuse = plan(*requests)
    by_id = {one.request_id: one for one in requests}
    in_passes = [part.request_id for spec in reuse.passes for part in spec.members]
    assert sorted([*in_passes, *reuse.reasons]) == sorted(by_id)
    for spec in reuse.passes:
        assert_right(spec, by_id)


def assert_right(spec: PassSpec, requests: dict[RequestId, GenerateRequest]) -> None:
    canonical = spec.canonical.token_ids
    assert len(spec.members) > 1
    for part in spec.members:
        prompt = requests[part.request_id].prompt_token_ids
        assert prompt[: len(part.token_ids)] == part.token_ids
        assert len(part.token_ids) < len(prompt), "something is left to compute"
        check(Extent(tokens=len(part.token_ids), history=0, pieces=part.pieces), len(canonical))
        for piece in part.pieces:
            source = canonical[piece.source : piece.source + piece.tokens]
            assert part.token_ids[piece.start : piece.start + piece.tokens] == source
        sources = [piece.source for piece in part.pieces]
        assert sources == sorted(set(sources)), "in the one order"
