"""Which tokens deviate, on a real model's own layers; and that a choice is one choice for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch

from td_serve.engine.choosing import Chooser, _covering
from td_serve.engine.collective import run_pass
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.parts import Limits, Part, batches, group_of
from td_serve.models.random_model import write_random
from td_serve.pic.base import Shared
from td_serve.store.families import NOTHING, Run
from td_serve.types import MemberPass, Piece, RequestId, Rule, RuleName, Span
from tests.engine.test_collective import (
    BLOCK,
    CANONICAL,
    CLOSE,
    PROMPTS,
    SEGMENTS,
    Engine,
    Prompt,
    canonical,
    finish,
)

pytestmark = pytest.mark.engine

SHARED = Shared(len(CANONICAL), [Span(start=start, tokens=count) for start, count in SEGMENTS])
HKVD = Rule(name=RuleName.HKVD, ratio=0.25, depth=0.6)
OWN = Rule(name=RuleName.HKVD, ratio=0.25, depth=0.6, own=True)
BUDGET = round(0.25 * sum(count for _, count in SEGMENTS))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_random(path, like="llama", layers=3, kv_heads=2, head_dim=64)
    return Engine(path)


def part(prompt: Prompt, pieces: Sequence[Piece] | None = None) -> Part:
    member = MemberPass(
        request_id=RequestId("one"),
        history="",
        token_ids=prompt.ids,
        pieces=prompt.pieces if pieces is None else list(pieces),
    )
    return Part(member, NOTHING, 0, ())


MANY = Limits(rows=9999, tokens=9999)


def choose(
    model: VllmModel,
    attention: PagedAttention,
    rule: Rule,
    parts: Sequence[Part],
    limits: Limits = MANY,
) -> list[list[bool]]:
    chooser = Chooser(model, attention, limits)
    chosen = finish(chooser.choose(rule, parts, canonical(model, attention), SHARED))
    return [list(one.chosen) for one in chosen]


ALL = [part(prompt) for prompt in PROMPTS]


def test_the_group_chooses_once_and_within_its_budget(engine: Engine) -> None:
    def work(model: VllmModel, attention: PagedAttention) -> list[Part]:
        chooser = Chooser(model, attention, MANY)
        kv = canonical(model, attention)
        parts: list[Part] = finish(chooser.choose(HKVD, ALL, kv, SHARED))
        everything = msgspec.structs.replace(HKVD, ratio=1.0)
        (none,) = {one.left for one in finish(chooser.choose(everything, ALL, kv, SHARED))}
        assert none == 0.0
        return parts

    parts = engine.in_worker(work)
    (left,) = {one.left for one in parts}
    assert left is not None
    assert 0 < left < 1
    first, *others = (list(one.chosen) for one in parts)
    assert sum(first) == BUDGET
    assert not any(first[: SEGMENTS[0][0]]), "the header is nobody's"
    assert all(one == first for one in others)


def test_the_group_goes_by_those_who_have_all_that_is_shared(engine: Engine) -> None:
    """The first member has one segment only, so that the second is asked too; the rest is not."""
    some = [part(PROMPTS[0], PROMPTS[0].pieces[:1]), *ALL[1:]]

    def work(model: VllmModel, attention: PagedAttention) -> list[list[list[bool]]]:
        return [choose(model, attention, HKVD, group) for group in (some, some[:2])]

    every, two = engine.in_worker(work)
    assert every[0] == two[0]
    second = slice(SEGMENTS[1][0], SEGMENTS[1][0] + SEGMENTS[1][1])
    assert any(every[0][second]), "or nobody has been asked for the second segment"


def test_the_choice_is_that_of_the_deviations_as_a_plain_loop_has_them(engine: Engine) -> None:
    one = ALL[1]

    def work(model: VllmModel, attention: PagedAttention) -> tuple[list[bool], list[float]]:
        kv = canonical(model, attention)
        layer = round(HKVD.depth * model.layers)
        everything = replace(one, chosen=[True] * len(CANONICAL))
        own = finish(run_pass(model, attention, group_of([everything], kv, BLOCK, layer))).kv
        far = [0.0] * len(CANONICAL)
        for piece in one.member.pieces:
            for offset in range(piece.tokens):
                here = own.keys[0][piece.start + offset].tolist()
                there = kv.keys[layer][piece.source + offset].tolist()
                far[piece.source + offset] = sum(
                    (a - b) ** 2 for a, b in zip(here, there, strict=True)
                ) / sum(b**2 for b in there)
        return choose(model, attention, HKVD, [one])[0], far

    chosen, far = engine.in_worker(work)
    shared = SHARED.places()
    highest = sorted(shared, key=lambda place: -far[place])[:BUDGET]
    assert [place for place in shared if chosen[place]] == sorted(highest)


def test_each_may_choose_by_itself_and_batches_change_nothing(engine: Engine) -> None:
    def work(model: VllmModel, attention: PagedAttention) -> list[list[list[bool]]]:
        alone = [choose(model, attention, OWN, [one])[0] for one in ALL]
        together = choose(model, attention, OWN, ALL)
        few_rows = choose(model, attention, OWN, ALL, MANY._replace(rows=1))
        little_room = choose(model, attention, OWN, ALL, MANY._replace(tokens=1))
        return [alone, together, few_rows, little_room]

    alone, together, few_rows, little_room = engine.in_worker(work)
    assert alone == together == few_rows == little_room
    assert len({tuple(one) for one in alone}) > 1, "their contexts are not the same"
    assert [sum(one) for one in alone] == [BUDGET] * len(ALL)


def test_a_batch_is_within_both_limits() -> None:
    """Or it is one member, who has more alone."""
    longest = max(len(one.member.token_ids) for one in ALL)
    for limits in (Limits(1, 9999), Limits(9999, longest - 1), Limits(9999, 2 * longest), MANY):
        found = list(batches(ALL, limits))
        assert [one for batch in found for one in batch] == ALL
        for batch in found:
            rows = sum(one.rows() for one in batch)
            tokens = sum(len(one.member.token_ids) for one in batch)
            assert len(batch) == 1 or (rows <= limits.rows and tokens <= limits.tokens)


def test_nothing_deviates_in_the_canonical_context(engine: Engine) -> None:
    """A member that begins as the canonical sequence does, and one that does not, for contrast."""
    same = Prompt(5, 0, 0, 0)
    same.ids = [*CANONICAL]
    same.pieces = [Piece(start=start, tokens=count, source=start) for start, count in SEGMENTS]

    def work(model: VllmModel, attention: PagedAttention) -> list[float]:
        kv = canonical(model, attention)
        found = []
        for one in (part(same), ALL[0]):
            everything = replace(one, chosen=[True] * len(CANONICAL))
            computed = finish(run_pass(model, attention, group_of([everything], kv, BLOCK, 2)))
            piece = one.member.pieces[0]
            here = computed.kv.keys[0][piece.start : piece.start + piece.tokens]
            there = kv.keys[2][piece.source : piece.source + piece.tokens]
            found.append(float((here - there).abs().max()))
        return found

    none, some = engine.in_worker(work)
    assert none < CLOSE
    assert some > 10 * CLOSE


def test_whom_too_much_would_have_to_be_computed_for_is_left_out(engine: Engine) -> None:
    """With a goal, by choices of their own: who reads it as it was computed goes on alone."""
    same = Prompt(5, 0, 0, 0)
    same.ids = [*CANONICAL]
    same.pieces = [Piece(start=start, tokens=count, source=start) for start, count in SEGMENTS]
    rule = msgspec.structs.replace(OWN, ratio=0.0, left=1e-6)

    def work(model: VllmModel, attention: PagedAttention) -> list[list[bool]]:
        chooser = Chooser(model, attention, MANY)
        kv = canonical(model, attention)
        asked = [*ALL, part(same)]
        alone = finish(chooser.choose(rule, asked, kv, SHARED))
        assert [one.member.token_ids for one in alone] == [same.ids]
        group = msgspec.structs.replace(rule, own=False)
        return [list(one.chosen) for one in finish(chooser.choose(group, asked, kv, SHARED))]

    assert engine.in_worker(work) == []


WEIGHED = msgspec.structs.replace(HKVD, weighed=True)


def asking(prompt: Prompt) -> Part:
    """A member whose last tokens are what is asked of it."""
    end = prompt.pieces[-1].start + prompt.pieces[-1].tokens
    member = MemberPass(
        request_id=RequestId("one"),
        history="",
        token_ids=prompt.ids[:end],
        pieces=prompt.pieces,
        asked=prompt.ids[end:],
    )
    return Part(member, NOTHING, 0, ())


def test_attention_is_what_a_plain_loop_says(engine: Engine) -> None:
    def work(model: VllmModel, attention: PagedAttention) -> None:
        one = model.attention[1]
        heads, kv_heads, size = one.num_heads, one.num_kv_heads, one.head_size
        assert heads > kv_heads, "or groups of heads would not be tried"
        rows, count = 3, 20
        query, keys = torch.randn(rows, heads, size), torch.randn(count, kv_heads, size)
        found = attention.attended(1, query.flatten(1), keys.flatten(1))
        wanted = torch.zeros(count)
        for row in range(rows):
            sees = count - rows + row + 1
            for head in range(heads):
                key = keys[:sees, head // (heads // kv_heads)]
                wanted[:sees] += ((key @ query[row, head]) / size**0.5).softmax(0)
        torch.testing.assert_close(found, wanted / (rows * heads))

    engine.in_worker(work)


def test_what_is_asked_decides_together_with_what_deviates(engine: Engine) -> None:
    """The choice is that of deviations times the root of the attention, both by a plain loop."""
    one = asking(PROMPTS[3])
    prompt = PROMPTS[3]

    def work(model: VllmModel, attention: PagedAttention) -> tuple[list[bool], list[float]]:
        kv = canonical(model, attention)
        layer = round(HKVD.depth * model.layers)
        everything = replace(part(prompt), chosen=[True] * len(CANONICAL))
        own = finish(run_pass(model, attention, group_of([everything], kv, BLOCK, layer)))
        (keys,) = own.kv.keys
        query, turned = model.rotate(
            layer, torch.arange(len(prompt.ids)), own.queries.clone(), keys.clone()
        )
        attended = attention.attended(layer, query[-len(one.member.asked) :], turned).tolist()
        score = [0.0] * len(CANONICAL)
        for piece in prompt.pieces:
            for offset in range(piece.tokens):
                here, there = keys[piece.start + offset], kv.keys[layer][piece.source + offset]
                far = float((here - there).square().sum() / there.square().sum())
                score[piece.source + offset] = far * attended[piece.start + offset] ** 0.5
        return choose(model, attention, WEIGHED, [one])[0], score

    chosen, score = engine.in_worker(work)
    shared = SHARED.places()
    highest = sorted(shared, key=lambda place: -score[place])[:BUDGET]
    assert [place for place in shared if chosen[place]] == sorted(highest)
    unweighed = engine.in_worker(lambda *parts: choose(*parts, HKVD, [one])[0])
    assert unweighed != chosen


@pytest.mark.parametrize(
    ("rule", "one"),
    [(HKVD, ALL[3]), (WEIGHED, asking(PROMPTS[3]))],
    ids=["by deviation", "by what is asked, too"],
)
def test_a_kept_history_gives_the_same_choice_as_a_computed_one(
    engine: Engine, rule: Rule, one: Part
) -> None:
    history = one.member.pieces[0].start

    def work(model: VllmModel, attention: PagedAttention) -> list[list[bool]]:
        kv = canonical(model, attention)
        everything = replace(one, chosen=[True] * len(CANONICAL))
        computed = finish(run_pass(model, attention, group_of([everything], kv, BLOCK)))
        run = Run(one.member.token_ids[:history], computed.kv.part(0, history))
        kept = replace(one, history=run, history_tokens=history)
        return [choose(model, attention, rule, [two])[0] for two in (one, kept)]

    computed, kept = engine.in_worker(work)
    assert computed == kept


def test_as_few_members_are_looked_at_as_have_everything() -> None:
    """One whose history reaches some tokens into what is shared does not make it two."""

    def of(name: str, *pieces: tuple[int, int], known: int = 0) -> Part:
        """Behind 10 tokens of its own: (tokens, source) of each piece."""
        at, placed = 10, []
        for count, source in pieces:
            placed.append(Piece(start=at, tokens=count, source=source))
            at += count
        member = MemberPass(
            request_id=RequestId(name), history=name, token_ids=[0] * at, pieces=placed
        )
        return Part(member, NOTHING, known, ())

    ada = of("ada", (30, 0), (20, 30), known=16)
    bo = of("bo", (30, 0), (20, 30))
    cyd = of("cyd", (20, 30), (40, 50))
    assert _covering([ada, bo]) == [bo]
    assert _covering([ada]) == [ada]
    assert _covering([ada, bo, cyd]) == [cyd, bo]
