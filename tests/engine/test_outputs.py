"""What was said is read as it was decoded, from the decode engine that has kept it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from td_serve.authors import Turn, find_written
from td_serve.config import DispatchSettings
from td_serve.dispatch import Dispatcher
from td_serve.engine.codec import greedy_sampling
from td_serve.engine.local import LocalEngines
from td_serve.metrics import silent_metrics
from td_serve.segments import key
from td_serve.types import (
    Canonical,
    Handle,
    RoundPrefill,
    Span,
)
from tests.engine.rig import (
    BLOCK,
    Oracle,
    make_request,
    new_conversation,
    some_tokens,
)
from tests.engine.round_rig import (
    FULL,
    HEADER,
    NONE,
    Shared,
    answer,
    is_blended,
    play,
    round_of,
    start,
    until_nothing_stays,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny: Path) -> AsyncIterator[LocalEngines]:
    # What is pinned for nobody stays so for longer than any test waits.
    engines = start(tiny, lease_s=600)
    yield engines
    engines.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_stays(engines: LocalEngines) -> AsyncIterator[None]:
    yield
    await until_nothing_stays(engines)


class Author:
    """An agent whose turn has been decoded, and is kept for those who read what it has put out."""

    def __init__(self, put_out: list[int], handle: Handle, start: int) -> None:
        self.put_out = put_out
        self.handle = handle
        self._start = start

    @classmethod
    async def speak(cls, engines: LocalEngines, prompt: list[int]) -> Author:
        request = msgspec.structs.replace(
            make_request(prompt, None, max_tokens=70), writes=new_conversation()
        )
        put_out: list[int] = []
        handle = None
        dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())
        async for delta in dispatcher.generate(request):
            put_out += (token for choice in delta.choices for token in choice.token_ids)
            handle = delta.handle or handle
        assert handle is not None, "its KV is kept"
        return cls(put_out, handle, len(prompt))

    def turn(self) -> Turn:
        lease, kept = self.handle.lease, self.handle.tokens
        return Turn(lease, None, self._start, self.put_out, kept)


def round_after(
    author: Author, header: list[int], seed: int, number: int
) -> tuple[RoundPrefill, int]:
    """Two members share what was said, and as much again; how many tokens are not written."""
    own = some_tokens(40, seed)
    ids = [*header, *author.put_out, *own]
    spans = [
        Span(start=len(header), tokens=len(author.put_out)),
        Span(start=len(header) + len(author.put_out), tokens=len(own)),
    ]
    name = key((str(number),), ids)  # nothing is kept of it
    shared = Shared(seed=1)
    shared.canonical = Canonical(key=name, token_ids=ids, segments=spans)
    members = [shared.member(history, 100 * history + seed) for history in (33, 64)]
    work = round_of(shared, members, NONE)
    (spec,) = work.passes
    written = find_written(ids, [author.turn()], None)
    work = msgspec.structs.replace(
        work,
        passes=[msgspec.structs.replace(spec, written=written)],
        turns={author.handle.lease: author.handle},
    )
    return work, len(ids) - sum(one.piece.tokens for one in written)


async def play_counting(
    engines: LocalEngines, work: RoundPrefill, caplog: pytest.LogCaptureFixture
) -> tuple[list[list[int]], int]:
    """The answers, and how many tokens of the canonical sequence were computed."""
    caplog.clear()
    with caplog.at_level("INFO"):
        answers, handovers = await play(engines, work)
    assert all(map(is_blended, handovers.values()))
    (computed,) = re.findall(r"in one order for all, (\d+) were computed", caplog.text)
    return answers, int(computed)


async def test_what_was_said_is_read_as_it_was_decoded(
    engines: LocalEngines, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoded behind the header itself it is what would be computed there: answers are the same.
    Behind another prompt it is not. Of a turn that is not kept any more all is computed."""
    header = some_tokens(HEADER + 30, 60)
    author = await Author.speak(engines, header)
    kept = (await engines.decode_hosts[0].lease_counts()).blocks
    assert kept == -(-author.handle.tokens // BLOCK) - len(header) // BLOCK, "what it said, no more"
    work, rest = round_after(author, header, 61, 1)
    total = len(work.passes[0].canonical.token_ids)
    assert rest == total - len(author.put_out) + 1, "all but its last token has KV"
    read, computed = await play_counting(engines, work, caplog)
    assert computed == rest
    assert "1 of 1 outputs were read as they were decoded" in caplog.text
    untouched = msgspec.structs.replace(round_after(author, header, 61, 2)[0], turns={})
    assert await play_counting(engines, untouched, caplog) == (read, total)
    other, _ = round_after(author, some_tokens(HEADER + 30, 62), 61, 3)
    unread = msgspec.structs.replace(other, turns={})
    elsewhere = (await play_counting(engines, unread, caplog))[0]
    assert (await play_counting(engines, again(other), caplog))[0] != elsewhere
    assert await engines.forget(author.handle.conversation)
    gone, _ = round_after(author, header, 61, 4)
    assert await play_counting(engines, gone, caplog) == (read, total)
    assert "0 of 1 outputs were read" in caplog.text


def again(work: RoundPrefill) -> RoundPrefill:
    """The same round, of which nothing is kept."""
    (spec,) = work.passes
    canonical = msgspec.structs.replace(spec.canonical, key=key((), some_tokens(9, 63)))
    return msgspec.structs.replace(
        work, passes=[msgspec.structs.replace(spec, canonical=canonical)]
    )


async def test_a_blended_turn_is_kept_for_those_who_read_what_it_said_and_for_no_one_else(
    engines: LocalEngines, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own conversation's next turn is computed: what is kept of it is not exact."""
    shared = Shared(seed=64)
    members = [shared.member(history, 100 * history + 64) for history in (33, 64)]
    conversation, author = new_conversation(), new_conversation()
    work = round_of(shared, members, NONE)
    request = msgspec.structs.replace(
        work.requests[0], conversation=conversation, writes=author, sampling=greedy_sampling(40)
    )
    work = msgspec.structs.replace(work, requests=[request, *work.requests[1:]])
    handovers = {part.request_id: part.handover async for part in engines.prefill_round(work)}
    await answer(engines, work.requests[1], handovers[work.requests[1].request_id])
    said: list[int] = []
    handle = None
    dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())
    async for delta in dispatcher.generate(request, handovers[request.request_id]):
        said += (token for choice in delta.choices for token in choice.token_ids)
        handle = delta.handle or handle
    assert handle is not None
    assert handle.conversation == author
    assert engines.directory.find(conversation) is None
    following = make_request([*request.prompt_token_ids, *said, 7], conversation)
    assert await answer(engines, following) == oracle.answer(following.prompt_token_ids)
    as_author = Author(said, handle, len(request.prompt_token_ids))
    read, rest = round_after(as_author, some_tokens(HEADER, 65), 66, 5)
    assert (await play_counting(engines, read, caplog))[1] == rest
    await engines.forget(author)
    await engines.forget(conversation)


async def nothing_read(
    engines: LocalEngines, seed: int, caplog: pytest.LogCaptureFixture
) -> tuple[RoundPrefill, Author, list[list[int]], int]:
    """A round of which nothing has been read yet; its answers without that, and all its tokens."""
    header = some_tokens(HEADER + 30, seed)
    author = await Author.speak(engines, header)
    work, _ = round_after(author, header, seed + 1, seed)
    unread = msgspec.structs.replace(again(work), turns={})
    answers, total = await play_counting(engines, unread, caplog)
    return work, author, answers, total


async def test_what_is_read_too_late_is_computed_and_nobody_uses_what_came_instead(
    engines: LocalEngines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are not sure to be kept any more when the engine comes to it."""
    work, author, answers, total = await nothing_read(engines, 70, caplog)
    reading = engines.hosts[0].reading
    source = reading.source

    def late(handle: Handle, until: float, least: int) -> dict[str, Any]:
        return source(handle, 0.0, least)

    monkeypatch.setattr(reading, "source", late)
    assert await play_counting(engines, work, caplog) == (answers, total)
    assert "0 of 1 outputs were read" in caplog.text
    assert await engines.forget(author.handle.conversation)


async def test_a_round_given_up_between_two_reads_leaves_nothing(
    engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output has come; the other's lease is never held, and then nobody wants either."""
    header = some_tokens(HEADER + 30, 90)
    authors = [await Author.speak(engines, some_tokens(length, 91)) for length in (50, 60)]
    ids, spans = [*header], []
    for author in authors:
        spans.append(Span(start=len(ids), tokens=len(author.put_out)))
        ids += author.put_out
    shared = Shared(seed=1)
    shared.canonical = Canonical(key=key(("given up",), ids), token_ids=ids, segments=spans)
    work = round_of(shared, [shared.member(length, length) for length in (33, 64)], NONE)
    (spec,) = work.passes
    written = find_written(ids, [author.turn() for author in authors], None)
    work = msgspec.structs.replace(
        work,
        passes=[msgspec.structs.replace(spec, written=written)],
        turns={author.handle.lease: author.handle for author in authors},
    )
    keeper = engines.hosts[0].reading.keeper
    hold = keeper.hold

    async def hold_the_first(handle: Handle, *rest: Any) -> bool:
        if handle.lease == authors[1].handle.lease:
            await asyncio.Event().wait()
        return await hold(handle, *rest)

    monkeypatch.setattr(keeper, "hold", hold_the_first)
    passes, parts = engines.hosts[0]._passes, engines.prefill_round(work)
    first = asyncio.ensure_future(anext(parts))
    async with asyncio.timeout(10):
        while not await passes.written():  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await parts.aclose()
    for author in authors:
        await engines.forget(author.handle.conversation)


async def test_a_keeper_that_does_not_answer_is_not_waited_for(
    engines: LocalEngines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, author, answers, total = await nothing_read(engines, 72, caplog)
    reading, never = engines.hosts[0].reading, asyncio.Event()

    async def hold(*_: Any) -> bool:
        await never.wait()
        return False

    settings = msgspec.structs.replace(reading.settings, read_patience_s=0.2)
    monkeypatch.setattr(reading, "settings", settings)
    monkeypatch.setattr(reading.keeper, "hold", hold)
    assert await play_counting(engines, work, caplog) == (answers, total)
    assert "1 outputs could not be read in time" in caplog.text
    never.set()
    monkeypatch.undo()
    assert await engines.forget(author.handle.conversation)


async def test_a_round_that_is_given_up_in_mid_read_holds_nothing(
    engines: LocalEngines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, author, _, _ = await nothing_read(engines, 74, caplog)
    reading, held = engines.hosts[0].reading, asyncio.Event()
    hold = reading.keeper.hold

    async def telling(*asked: Any) -> bool:
        answer: bool = await hold(*asked)
        held.set()
        return answer

    monkeypatch.setattr(reading.keeper, "hold", telling)
    members = engines.prefill_round(work)
    first = asyncio.ensure_future(anext(members))
    await held.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await members.aclose()
    monkeypatch.undo()
    assert await engines.forget(author.handle.conversation)


async def test_what_stands_there_twice_is_read_for_both_places_and_not_again(
    engines: LocalEngines, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """With everything computed in members' own contexts, answers are the engine's own."""
    header = some_tokens(HEADER, 76)
    author = await Author.speak(engines, some_tokens(HEADER + 50, 77))
    ids = [*header, *author.put_out, *some_tokens(9, 78), *author.put_out]
    spans = [
        Span(start=HEADER, tokens=len(author.put_out) + 9),
        Span(start=HEADER + len(author.put_out) + 9, tokens=len(author.put_out)),
    ]
    shared = Shared(seed=1)
    shared.canonical = Canonical(key=key((), ids), token_ids=ids, segments=spans)
    written = find_written(ids, [author.turn()], None)
    assert [one.name for one in written] == [author.handle.lease] * 2
    for number, (read, computed) in enumerate([(2, HEADER + 9 + 2), (0, 0)]):
        members = [shared.member(history, 100 * history + number) for history in (33, 64)]
        work = round_of(shared, members, FULL)
        (spec,) = work.passes
        work = msgspec.structs.replace(
            work,
            passes=[msgspec.structs.replace(spec, written=written)],
            turns={author.handle.lease: author.handle},
        )
        wanted = [oracle.answer(request.prompt_token_ids) for request, _ in members]
        assert await play_counting(engines, work, caplog) == (wanted, computed)
        assert f"{read} of {read} outputs were read as they were decoded" in caplog.text
    assert await engines.forget(author.handle.conversation)
