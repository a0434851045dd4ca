"""Rounds by passes, from a prefill engine to a decode engine: right tokens, and nothing stays."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from td_serve.engine.local import LocalEngines
from td_serve.engine.passes import Made
from td_serve.errors import Unavailable
from td_serve.models.random_model import write_random
from td_serve.segments import key
from td_serve.types import (
    Canonical,
    Forecast,
    Handover,
    PassSpec,
    Piece,
    RequestId,
    RoundPlan,
    RoundPrefill,
    Rule,
    RuleName,
    Said,
    SessionId,
    Span,
    pack,
)
from tests.engine.rig import (
    CONVERSATIONS,
    ENGINE,
    NIXL,
    Oracle,
    engine_processes,
    make_request,
    new_conversation,
    some_tokens,
)
from tests.engine.round_rig import (
    FULL,
    HEADER,
    NONE,
    SEGMENTS,
    Shared,
    answer,
    calls_to,
    deltas_of,
    first_slice_of,
    is_blended,
    play,
    round_of,
    start,
    tokens_of,
    until_nothing_stays,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny: Path) -> AsyncIterator[LocalEngines]:
    # What nobody was told of in time is pinned until its lease ends: soon.
    engines = start(tiny, lease_s=8)
    yield engines
    engines.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_stays(engines: LocalEngines) -> AsyncIterator[None]:
    yield
    await until_nothing_stays(engines)


async def test_a_pass_that_computes_everything_gives_the_engines_own_answers(
    engines: LocalEngines, oracle: Oracle
) -> None:
    shared = Shared(seed=2)
    members = [shared.member(history, 100 * history) for history in (1, 40, 131)]
    answers, handovers = await play(engines, round_of(shared, members, FULL))
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    assert [one.cached_tokens for one in handovers.values()] == [0, 0, 0]
    assert all(map(is_blended, handovers.values())), "by the pass"


async def test_what_a_pass_reused_counts_as_not_computed(engines: LocalEngines) -> None:
    shared = Shared(seed=3)
    members = [shared.member(history, 100 * history + 1) for history in (1, 40)]
    _, handovers = await play(engines, round_of(shared, members, NONE))
    assert [one.cached_tokens for one in handovers.values()] == [sum(SEGMENTS)] * 2


async def test_what_is_lost_before_it_is_loaded_counts_as_computed(
    engines: LocalEngines, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first member's is, behind its pass: the engine computes it, as the reply's usage says."""
    shared = Shared(seed=34)
    members = [shared.member(history, 100 * history + 34) for history in (33, 64)]
    lost, kept = (request for request, _ in members)
    passes = engines.hosts[0]._passes
    make = passes.make

    async def made_and_lost(spec: PassSpec, name: str) -> dict[RequestId, Made]:
        made = await make(spec, name)
        await passes._call("td_release", [lost.request_id])
        return made

    monkeypatch.setattr(passes, "make", made_and_lost)
    handovers: dict[str, Handover] = {}
    async for part in engines.prefill_round(round_of(shared, members, NONE)):
        assert part.handover is not None, part.error
        handovers[part.request_id] = part.handover
    of_lost, of_kept = handovers[lost.request_id], handovers[kept.request_id]
    assert (of_lost.cached_tokens, of_lost.blended) == (0, None)
    assert (of_kept.cached_tokens, of_kept.blended is None) == (sum(SEGMENTS), False)
    deltas = await deltas_of(engines, lost, of_lost)
    assert tokens_of(deltas) == oracle.answer(lost.prompt_token_ids)
    assert deltas[-1].cached_tokens == 0
    deltas = await deltas_of(engines, kept, of_kept)
    assert tokens_of(deltas) != oracle.answer(kept.prompt_token_ids), "or nothing was loaded"
    assert deltas[-1].cached_tokens == sum(SEGMENTS)


async def test_what_is_computed_behind_the_shared_part_is_kept_with_it(
    engines: LocalEngines,
) -> None:
    """A prompt that goes on where the last one ended, its task included, has all of it."""
    shared = Shared(seed=90)
    first = [shared.member(history, 900 + history) for history in (20, 50)]
    await play(engines, round_of(shared, first, NONE))
    more = some_tokens(40, 99)
    canonical = shared.canonical
    ids = [*canonical.token_ids, *more]
    spans = [*canonical.segments, Span(start=len(canonical.token_ids), tokens=len(more))]
    shared.canonical = Canonical(key=canonical.key, token_ids=ids, segments=spans)
    members = []
    for request, part in first:
        prompt = [*request.prompt_token_ids, *more]
        piece = Piece(start=len(request.prompt_token_ids), tokens=len(more), source=spans[-1].start)
        part = msgspec.structs.replace(part, token_ids=prompt, pieces=[*part.pieces, piece])
        again = make_request([*prompt, 7], None)
        members.append((again, msgspec.structs.replace(part, request_id=again.request_id)))
    _, handovers = await play(engines, round_of(shared, members, NONE))
    for (request, _), (again, _) in zip(first, members, strict=True):
        counted = handovers[again.request_id].blended
        assert counted is not None
        assert counted.local == len(request.prompt_token_ids)
        assert (counted.reused, counted.new) == (len(more), 0)


async def test_reused_kv_meets_no_exact_request_on_either_engine(
    engines: LocalEngines, oracle: Oracle
) -> None:
    """The same prompts, asked again without a round, with both engines' prefix caches warm."""
    shared = Shared(seed=4)
    members = [shared.member(history, 100 * history + 2) for history in (33, 64)]
    reused, _ = await play(engines, round_of(shared, members, NONE))
    exact = [oracle.answer(request.prompt_token_ids) for request, _ in members]
    assert reused != exact, "or this would prove nothing"
    for (request, _), wanted in zip(members, exact, strict=True):
        again = make_request(request.prompt_token_ids, None)
        assert await answer(engines, again) == wanted


async def test_members_outside_a_pass_are_prefilled_by_themselves(
    engines: LocalEngines, oracle: Oracle
) -> None:
    shared = Shared(seed=5)
    members = [shared.member(history, 100 * history + 3) for history in (10, 20, 30)]
    work = round_of(shared, members[:2], FULL)
    work = msgspec.structs.replace(work, requests=[request for request, _ in members])
    answers, handovers = await play(engines, work)
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    blended = [is_blended(handovers[request.request_id]) for request, _ in members]
    assert blended == [True, True, False]


async def test_a_cold_round_warms_the_next_also_where_its_turns_are_read_back(
    engines: LocalEngines, oracle: Oracle
) -> None:
    """The second member's cold prompt begins with a turn that the decode engine keeps."""
    shared = Shared(seed=50)
    members = [shared.member(history, 100 * history + 50) for history in (150, 230)]
    begun = [
        request.prompt_token_ids[:count]
        for (request, _), count in zip(members, (150, 230), strict=True)
    ]
    conversation = new_conversation()
    turn = make_request(begun[1][:150], conversation)
    await answer(engines, turn, await engines.prefill(turn))
    cold = [make_request([*begun[0], 7, 8], None), make_request([*begun[1], 9], conversation)]
    work = RoundPrefill(
        plan=RoundPlan(sim=SessionId("sim"), round=0, members=[]),
        requests=cold,
        histories={
            str(request.request_id): part.history
            for request, (_, part) in zip(cold, members, strict=True)
        },
    )
    answers, handovers = await play(engines, work)
    assert answers == [oracle.answer(request.prompt_token_ids) for request in cold]
    assert not any(map(is_blended, handovers.values()))
    answers, handovers = await play(engines, round_of(shared, members, FULL))
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    spared = [handovers[request.request_id].cached_tokens for request, _ in members]
    assert spared == [150, 230]
    assert await engines.forget(conversation)


async def test_a_pass_that_fails_has_its_members_served_alone(
    engines: LocalEngines, oracle: Oracle
) -> None:
    shared = Shared(seed=6)
    members = [shared.member(history, 100 * history + 4) for history in (10, 20)]
    work = round_of(shared, members, FULL)
    (spec,) = work.passes
    beyond = [Piece(start=0, tokens=10_000, source=0)]
    broken = [msgspec.structs.replace(part, pieces=beyond) for part in spec.members]
    work = msgspec.structs.replace(work, passes=[msgspec.structs.replace(spec, members=broken)])
    answers, handovers = await play(engines, work)
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    assert not any(map(is_blended, handovers.values()))


async def test_a_member_that_leaves_in_mid_pass_leaves_nothing_in_the_engine(
    engines: LocalEngines, oracle: Oracle
) -> None:
    shared = Shared(seed=8)
    members = [shared.member(history, 100 * history + 6) for history in (10, 20)]
    work = round_of(shared, members, FULL)
    gone, stays = work.requests
    parts = engines.prefill_round(work)
    async with first_slice_of(engines) as asked:
        first = asyncio.ensure_future(anext(parts))
        await asked.wait()
        await engines.cancel_member(gone.request_id)
    found = {(await first).request_id: (await first).handover}
    async for part in parts:
        found[part.request_id] = part.handover
    assert found[gone.request_id] is None
    answers = await answer(engines, stays, found[stays.request_id])
    assert answers == oracle.answer(stays.prompt_token_ids)
    async with asyncio.timeout(20):
        while await engines.hosts[0].mirrors():  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("after_s", [0.0, None, 0.1])
async def test_a_round_that_is_given_up_leaves_the_next_one_alone(
    engines: LocalEngines, oracle: Oracle, after_s: float | None
) -> None:
    """At its beginning, in mid-pass (None), and whenever 0.1 s is."""
    shared = Shared(seed=7)
    members = [shared.member(history, 100 * history + 5) for history in (10, 20)]
    parts = engines.prefill_round(round_of(shared, members, FULL))
    async with first_slice_of(engines) as asked:
        first = asyncio.ensure_future(anext(parts))
        await (asked.wait() if after_s is None else asyncio.sleep(after_s))
        first.cancel()
    try:
        part = await first
        assert part.handover is not None
        await engines.release(part.handover)
    except asyncio.CancelledError:
        pass
    await parts.aclose()
    answers, handovers = await play(engines, round_of(shared, members, FULL))
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    assert all(map(is_blended, handovers.values())), "its pass was not in the way"


async def test_an_engine_that_dies_in_mid_pass_fails_its_members_and_keeps_nobody_waiting(
    tiny: Path,
) -> None:
    before = engine_processes()
    engines = LocalEngines.start(str(tiny), ENGINE, NIXL, CONVERSATIONS)
    prefill = engines.hosts[0]
    shared = Shared(seed=9)
    members = [shared.member(history, 100 * history + 7) for history in (300, 400)]
    parts = engines.prefill_round(round_of(shared, members, FULL))
    async with first_slice_of(engines) as asked:
        first = asyncio.ensure_future(anext(parts))
        await asked.wait()
        for process in engine_processes() - before:
            process.kill()
    async with asyncio.timeout(60):
        found = [await first] + [part async for part in parts]
    assert [part.handover for part in found] == [None, None]
    assert all("died" in (part.error or "") for part in found)
    with pytest.raises(Unavailable):
        await prefill.mirrors()
    engines.close()


async def test_a_model_that_no_pass_computes_is_served_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sliding window: the reason is known before the first round, and rounds are not the worse
    for it."""
    model = write_random(tmp_path / "sliding", like="mistral", layers=2)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 64}), "utf-8")
    engines = LocalEngines.start(str(model), ENGINE, NIXL, CONVERSATIONS)
    try:
        prefill = engines.hosts[0]
        why = await prefill.why_no_passes()
        assert why is not None
        assert "a sliding window, which no pass computes" in why
        assert prefill.state().why_no_passes == why
        shared = Shared(seed=11)
        members = [shared.member(history, 100 * history + 11) for history in (30, 90)]
        answers, handovers = await play(engines, round_of(shared, members, NONE))
        assert not any(map(is_blended, handovers.values()))
        assert await prefill.mirrors() == 0
        alone = [
            await answer(engines, request, await engines.prefill(request))
            for request in (
                msgspec.structs.replace(one, request_id=RequestId(f"{one.request_id}-alone"))
                for one, _ in members
            )
        ]
        assert answers == alone
    finally:
        engines.close()
    assert "exception was never retrieved" not in caplog.text


async def test_a_round_that_wants_most_of_it_anew_is_served_exactly_and_so_is_the_next(
    engines: LocalEngines, oracle: Oracle
) -> None:
    """A pass finds out, and leaves nothing; the round after it makes no pass at all."""
    rule = Rule(name=RuleName.HKVD, ratio=0.0, left=1e-6, depth=0.5)
    shared = Shared(seed=30)
    with calls_to(engines) as asked:
        for begun in (1, 1, 2):
            members = [shared.member(history, 100 * history + 30) for history in (33, 64)]
            answers, handovers = await play(engines, round_of(shared, members, rule))
            assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
            assert not any(map(is_blended, handovers.values()))
            assert asked.count("td_begin") == begun
            assert await engines.hosts[0].mirrors() == 0


async def test_what_is_shared_beyond_the_window_is_never_asked_for_and_told_of_once(
    engines: LocalEngines, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """Each member hears a part of it only: the prompts fit. A later round may share less."""
    caplog.set_level(logging.INFO, "td_serve")
    shared, longer = Shared(seed=31), Shared(seed=31)
    ids = [*shared.canonical.token_ids, *some_tokens(2048, 32)]
    longer.canonical = msgspec.structs.replace(shared.canonical, token_ids=ids)

    async def played(shared: Shared) -> list[bool]:
        members = [shared.member(history, 100 * history + 31) for history in (33, 64)]
        answers, handovers = await play(engines, round_of(shared, members, FULL))
        assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
        return [is_blended(one) for one in handovers.values()]

    with calls_to(engines) as asked:
        assert [await played(longer) for _ in range(3)] == [[False, False]] * 3
        await engines.hosts[0]._passes.prepare(longer.canonical)
        assert "td_begin" not in asked
    assert caplog.text.count("share more than the model's window holds") == 1
    assert await played(shared) == [True, True]


async def computed_for(engines: LocalEngines, canonical: Canonical) -> int:
    """How many tokens of a canonical sequence a pass has to compute now."""
    spec = PassSpec(canonical=canonical, rule=NONE, members=[])
    return (await engines.hosts[0]._passes._run(spec)).canonical


async def test_what_was_prepared_is_not_computed_again_and_gives_the_same(
    engines: LocalEngines, oracle: Oracle
) -> None:
    passes = engines.hosts[0]._passes
    shared = Shared(seed=40)
    first = msgspec.structs.replace(
        shared.canonical,
        token_ids=shared.canonical.token_ids[: HEADER + SEGMENTS[0]],
        segments=shared.canonical.segments[:1],
    )
    await passes.prepare(first)
    assert await engines.hosts[0].mirrors() == 0
    total = HEADER + sum(SEGMENTS)
    assert await computed_for(engines, shared.canonical) == total - HEADER - SEGMENTS[0]
    assert await computed_for(engines, shared.canonical) == 0
    members = [shared.member(history, 100 * history + 40) for history in (33, 64)]
    answers, handovers = await play(engines, round_of(shared, members, FULL))
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    assert all(map(is_blended, handovers.values()))


def sequence_of(count: int, seed: int) -> Canonical:
    ids = some_tokens(count, seed)
    return Canonical(key=key((), ids), token_ids=ids, segments=[])


@pytest.mark.parametrize("other", ["round", "request"])
async def test_what_else_is_to_be_done_does_not_wait_for_a_preparation(
    engines: LocalEngines, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """It is given up in mid-pass; its own session's round would have waited for it."""
    passes = engines.hosts[0]._passes
    monkeypatch.setattr(passes, "_slice_s", 0.0)
    sequence = sequence_of(700, 41 if other == "round" else 44)
    async with first_slice_of(engines) as asked:
        preparing = asyncio.create_task(passes.prepare(sequence))
        await asked.wait()
        shared = Shared(seed=41)
        members = [shared.member(history, 100 * history + 41) for history in (33, 64)]
        work = round_of(shared, members, FULL)
        if other == "request":
            work = msgspec.structs.replace(work, passes=[], requests=work.requests[:1])
        answers, handovers = await play(engines, work)
        await preparing
    assert answers == [oracle.answer(request.prompt_token_ids) for request in work.requests]
    assert all(is_blended(one) == (other == "round") for one in handovers.values())
    assert await computed_for(engines, sequence) > 0, "it had come to its end"


async def test_a_preparation_that_fails_or_is_left_changes_nothing(
    engines: LocalEngines, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    passes = engines.hosts[0]._passes
    sequence = sequence_of(700, 43)
    await passes._call("td_begin", pack(PassSpec(canonical=sequence, rule=NONE, members=[])))
    await passes.prepare(sequence_of(70, 42))
    assert "a pass is under way" in caplog.text
    async with first_slice_of(engines) as asked:
        preparing = asyncio.create_task(passes.prepare(sequence))
        await asked.wait()
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
    shared = Shared(seed=43)
    members = [shared.member(history, 100 * history + 43) for history in (33, 64)]
    answers, handovers = await play(engines, round_of(shared, members, FULL))
    assert answers == [oracle.answer(request.prompt_token_ids) for request, _ in members]
    assert all(map(is_blended, handovers.values()))


async def test_a_forecast_is_prepared_where_its_session_was_and_only_in_idle_times(
    engines: LocalEngines,
) -> None:
    """The tokenizer is the model's own: texts that stand in the last sequence are replaced."""
    host = engines.hosts[0]
    tokenizer = host._llm.renderer.tokenizer
    head = some_tokens(HEADER, 45)

    def sequence(text: str) -> Canonical:
        said = tokenizer.encode(f"{text}\n\n", add_special_tokens=False)
        span = Span(start=len(head), tokens=len(said))
        return Canonical(key=key((), head), token_ids=[*head, *said], segments=[span])

    forecast = Forecast(
        sim=SessionId("sim"),
        last=sequence("I have baked forty loaves."),
        grows=False,
        said=[Said(before="I have baked forty loaves.", now="The gate is open again.")],
    )
    await host.prepare(forecast)
    assert await computed_for(engines, sequence("The gate is open again.")) == 0
