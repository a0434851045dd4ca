"""What a pass has made of a prompt is how the next one begins: references, and rows of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from td_serve.segments import key
from td_serve.types import Canonical, Piece, Rule, RuleName, Span
from tests.engine.test_passes import FULL, HEADER, NONE, Engine, Member, spec_of, tokens
from tests.engine.test_passes import engine as engine
from tests.engine.test_passes import model as model

pytestmark = pytest.mark.engine

SAID = (70, 33, 90)
"""How much is said in each round."""
FIRST = Rule(name=RuleName.FIRST_K, k=5)


class Transcript:
    """Agents whose prompts grow from round to round: what was said, and what each has seen."""

    def __init__(self, name: str, rounds: int, seed: int = 0) -> None:
        ids = tokens(HEADER, 7)
        spans = []
        for number in range(rounds):
            spans.append(Span(start=len(ids), tokens=SAID[number]))
            ids = ids + tokens(SAID[number], 300 + 10 * seed + number)
        self.canonical = Canonical(key=key((name,), []), token_ids=ids, segments=spans)
        self.members = [self._member(name, agent) for agent in range(3)]

    def _member(self, name: str, agent: int) -> Member:
        member = Member(self, tokens(40 + 30 * agent, agent), f"{name}-{agent}")  # type: ignore[arg-type]
        prompt, pieces = tokens(40 + 30 * agent, agent), []
        for number, span in enumerate(self.canonical.segments):
            pieces.append(Piece(start=len(prompt), tokens=span.tokens, source=span.start))
            prompt += self.canonical.token_ids[span.start : span.start + span.tokens]
            prompt += tokens(9, 70 + 10 * agent + number)  # what it sees then
        end = pieces[-1].start + pieces[-1].tokens
        member.spec = msgspec.structs.replace(
            member.spec, token_ids=prompt[:end], pieces=pieces, asked=[]
        )
        member.prompt = [*prompt, 5, 6, 7]
        return member


def play(
    engine: Engine, transcript: Transcript, rule: Rule
) -> tuple[list[int], list[int], list[list[int]]]:
    """By member, how many tokens were kept and how many computed; and the answers."""
    found = engine.run(spec_of(transcript, transcript.members, rule)).members  # type: ignore[arg-type]
    counted = [found[member.spec.request_id] for member in transcript.members]
    answers = engine.answers(transcript.members, load=True)
    engine.release(transcript.members)
    return (
        [one.local for one in counted],
        [one.selected + one.new for one in counted],
        answers,
    )


@pytest.mark.parametrize("rule", [NONE, FIRST, FULL], ids=lambda rule: rule.name.value)
def test_round_by_round_is_as_good_as_at_once_and_only_what_is_new_is_computed(
    engine: Engine, rule: Rule
) -> None:
    for rounds in (1, 2, 3):
        grown = Transcript(f"grows-{rule.name}", rounds)
        local, computed, answers = play(engine, grown, rule)
        before = [len(one.spec.token_ids) for one in Transcript("", rounds - 1 or 1).members]
        assert local == (before if rounds > 1 else [0, 0, 0])
        if rounds > 1:
            again = {NONE: 0, FIRST: FIRST.k, FULL: SAID[rounds - 1]}[rule]
            assert computed == [9 + again] * 3, "what was seen, and what the rule has chosen"
        at_once = Transcript(f"at once-{rule.name}-{rounds}", rounds)
        assert play(engine, at_once, rule)[2] == answers
        if rule is FULL:
            assert engine.answers(grown.members, load=False) == answers


def test_of_a_member_without_a_name_for_its_history_nothing_is_kept(engine: Engine) -> None:
    for _ in range(2):
        transcript = Transcript("unnamed", 1)
        for member in transcript.members:
            member.spec = msgspec.structs.replace(member.spec, history="")
        local, _, answers = play(engine, transcript, FULL)
        assert local == [0, 0, 0]
        assert answers == engine.answers(transcript.members, load=False)


def test_what_another_rule_has_made_is_not_taken_over(engine: Engine) -> None:
    """Only what stands before all that is shared: that is the prompt's own."""
    for rounds, rule in ((1, NONE), (2, FULL), (3, NONE)):
        transcript = Transcript("changes", rounds)
        local, _, answers = play(engine, transcript, rule)
        assert local == ([40, 70, 100] if rounds > 1 else [0, 0, 0])
        if rule is FULL:
            assert engine.answers(transcript.members, load=False) == answers


def test_of_what_another_canonical_sequence_had_only_what_is_exact_is_kept(engine: Engine) -> None:
    """The first round's text is no segment any more: it is everybody's own history now."""
    play(engine, Transcript("another", 1), FIRST)
    second = Transcript("another", 2)
    span = second.canonical.segments[1]
    text = second.canonical.token_ids[span.start : span.start + span.tokens]
    second.canonical = Canonical(
        key=key(("yet another",), []),
        token_ids=[*tokens(HEADER, 7), *text],
        segments=[Span(start=HEADER, tokens=len(text))],
    )
    for member in second.members:
        piece = msgspec.structs.replace(member.spec.pieces[1], source=HEADER)
        member.spec = msgspec.structs.replace(member.spec, pieces=[piece])
    local, _, answers = play(engine, second, FULL)
    assert local == [40, 70, 100]
    assert answers == engine.answers(second.members, load=False)


DEVIATING = [
    Rule(name=RuleName.HKVD, ratio=0.3, depth=0.5, weighed=True),
    Rule(name=RuleName.HKVD, ratio=0.3, depth=0.5, own=True),
    Rule(name=RuleName.HKVD, ratio=0.3, depth=0.5, own=True, weighed=True),
    Rule(name=RuleName.HKVD, ratio=1.0, left=0.01, depth=0.5, weighed=True),
]


@pytest.mark.parametrize("rule", DEVIATING)
def test_who_has_it_all_already_computes_nothing_whatever_the_rule(
    engine: Engine, rule: Rule
) -> None:
    """A round that is played again; and one in which a member comes anew."""
    name = f"again-{msgspec.json.encode(rule).decode()}"
    first = Transcript(name, 2)
    _, _, answers = play(engine, first, rule)
    second = Transcript(name, 2)
    local, computed, found = play(engine, second, rule)
    assert local == [len(member.spec.token_ids) for member in second.members]
    assert (computed, found) == ([0, 0, 0], answers)
    third = Transcript(name, 2)
    new = third.members[0]
    new.spec = msgspec.structs.replace(new.spec, history=f"{name}-new")
    local, computed, found = play(engine, third, rule)
    assert local == [0, *(len(member.spec.token_ids) for member in third.members[1:])]
    assert computed[1:] == [0, 0]
    assert computed[0] > 0
    assert found[1:] == answers[1:]


def test_a_check_layer_sees_a_history_that_was_blended(engine: Engine) -> None:
    """With everything chosen by its deviation, answers are those of computing it all, though what
    came before was taken over."""
    everything = Rule(name=RuleName.HKVD, ratio=1.0, depth=0.5, weighed=True)
    for rounds in (1, 2, 3):
        transcript = Transcript("seen", rounds)
        _, computed, answers = play(engine, transcript, everything)
        assert computed == [
            SAID[rounds - 1] + (9 if rounds > 1 else 40 + 30 * agent) for agent in range(3)
        ]
        assert engine.answers(transcript.members, load=False) == answers


def test_many_rounds_leave_no_more_than_the_last_one_needs(model: Path) -> None:
    """Texts change from round to round, and histories grow: what was of other texts is gone."""
    room = 4 * 2 * 2 * 64 * 4 * 600  # of 600 tokens: layers, keys and values, heads, numbers, bytes
    small = Engine(model, store_bytes=room)
    try:
        assert small.call("td_why_no_passes") is None
        for number in range(12):
            transcript = Transcript(f"none-{number}", 1, seed=number)
            for agent, member in enumerate(transcript.members):
                more = tokens(5 * number, 900 + agent)
                prompt = [*member.spec.token_ids[: 40 + 30 * agent], *more]
                text = member.spec.token_ids[40 + 30 * agent :]
                piece = msgspec.structs.replace(member.spec.pieces[0], start=len(prompt))
                member.spec = msgspec.structs.replace(
                    member.spec,
                    token_ids=[*prompt, *text],
                    pieces=[piece],
                    history=f"grows-{agent}",
                )
                member.prompt = [*member.spec.token_ids, 5, 6, 7]
            local, _, _ = play(small, transcript, FIRST)
            if number:
                assert local == [40 + 30 * agent + 5 * (number - 1) for agent in range(3)]
            assert small.mirrors() == 0
    finally:
        small.close()


def test_a_family_takes_little_more_than_what_is_shared_once(model: Path) -> None:
    """The room is for one prompt and a half; three agents' of three rounds are kept."""
    prompts = [len(member.spec.token_ids) for member in Transcript("", 3).members]
    kept_bytes = 4 * 2 * 2 * 64 * 4  # of a token: layers, keys and values, heads, numbers, bytes
    small = Engine(model, store_bytes=max(prompts) * kept_bytes * 3 // 2)
    try:
        assert small.call("td_why_no_passes") is None
        for rounds in (1, 2, 3):
            local, _, _ = play(small, Transcript("small", rounds), NONE)
            if rounds > 1:
                before = [len(one.spec.token_ids) for one in Transcript("", rounds - 1).members]
                assert local == before
            assert small.mirrors() == 0
        again = Transcript("small", 3)
        assert small.call("td_known", again.canonical.key, again.canonical.token_ids) == len(
            again.canonical.token_ids
        ), "it goes last"
    finally:
        small.close()
