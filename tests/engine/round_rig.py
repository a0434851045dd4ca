"""Rounds by passes, for tests: what members share, their parts, and how they are played."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from td_serve.config import DispatchSettings
from td_serve.dispatch import Dispatcher
from td_serve.engine.local import LocalEngines
from td_serve.metrics import silent_metrics
from td_serve.segments import key
from td_serve.types import (
    Canonical,
    Delta,
    GenerateRequest,
    Handover,
    MemberPass,
    PassSpec,
    Piece,
    RoundPlan,
    RoundPrefill,
    Rule,
    RuleName,
    SessionId,
    Span,
)
from tests.engine.rig import CONVERSATIONS, ENGINE, NIXL, make_request, some_tokens

HEADER = 20
SEGMENTS = (64, 33, 90)
FULL = Rule(name=RuleName.FULL)
NONE = Rule(name=RuleName.NONE)


def start(model: Path, lease_s: int) -> LocalEngines:
    """A prefill and a decode engine. What a prefill leaves for nobody is pinned for `lease_s`."""
    engine = msgspec.structs.replace(ENGINE, enable_prefix_caching=True)
    nixl = msgspec.structs.replace(NIXL, lease_s=lease_s)
    return LocalEngines.start(str(model), engine, nixl, CONVERSATIONS)


async def until_nothing_stays(engines: LocalEngines) -> None:
    """Nothing is held, pinned, leased, or kept to be loaded or taken over. Raises TimeoutError."""
    prefill, decode = engines.hosts
    async with asyncio.timeout(30):
        while (await decode.lease_counts()).held:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
        while any(host.state().kv_usage for host in engines.hosts):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while await prefill.mirrors() or await prefill._passes.written():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class Shared:
    """What all members of a round read, in one order, after a header."""

    def __init__(self, seed: int) -> None:
        ids = some_tokens(HEADER, 1)
        spans = []
        for number, count in enumerate(SEGMENTS):
            spans.append(Span(start=len(ids), tokens=count))
            ids += some_tokens(count, 10 * seed + number)
        self.canonical = Canonical(key=key((), ids), token_ids=ids, segments=spans)

    def member(self, history: int, seed: int) -> tuple[GenerateRequest, MemberPass]:
        prompt = some_tokens(history, seed)
        pieces = []
        for span in self.canonical.segments:
            pieces.append(Piece(start=len(prompt), tokens=span.tokens, source=span.start))
            prompt += self.canonical.token_ids[span.start : span.start + span.tokens]
        request = make_request(prompt + some_tokens(12, seed + 1), None)
        part = MemberPass(
            request_id=request.request_id,
            history=f"history-{seed}-{self.canonical.key}",
            token_ids=prompt,
            pieces=pieces,
        )
        return request, part


def round_of(
    shared: Shared, members: list[tuple[GenerateRequest, MemberPass]], rule: Rule
) -> RoundPrefill:
    spec = PassSpec(canonical=shared.canonical, rule=rule, members=[part for _, part in members])
    return RoundPrefill(
        plan=RoundPlan(sim=SessionId("sim"), round=0, members=[]),
        requests=[request for request, _ in members],
        passes=[spec],
    )


async def play(
    engines: LocalEngines, work: RoundPrefill
) -> tuple[list[list[int]], dict[str, Handover]]:
    """Each member's tokens, in order, and how it was prefilled."""
    handovers: dict[str, Handover] = {}
    async for part in engines.prefill_round(work):
        assert part.handover is not None, part.error
        handovers[part.request_id] = part.handover
    answers = [await answer(engines, one, handovers[one.request_id]) for one in work.requests]
    return answers, handovers


@contextlib.asynccontextmanager
async def first_slice_of(engines: LocalEngines) -> AsyncIterator[asyncio.Event]:
    """Set once the engine has been asked for a slice of a pass."""
    llm = engines.hosts[0]._llm
    ask, asked = llm.collective_rpc, asyncio.Event()

    async def watched(method: str, *args: Any, **kwargs: Any) -> Any:
        answer = asyncio.ensure_future(ask(method, *args, **kwargs))
        if method == "td_step":
            await asyncio.sleep(0)  # it has been sent
            asked.set()
        return await answer

    llm.collective_rpc = watched
    try:
        yield asked
    finally:
        llm.collective_rpc = ask


@contextlib.contextmanager
def calls_to(engines: LocalEngines) -> Iterator[list[str]]:
    """What the prefill engine's worker is asked within, by name."""
    llm = engines.hosts[0]._llm
    ask, asked = llm.collective_rpc, list[str]()

    async def counted(method: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(method)
        return await ask(method, *args, **kwargs)

    llm.collective_rpc = counted
    try:
        yield asked
    finally:
        llm.collective_rpc = ask


def is_blended(handover: Handover) -> bool:
    return handover.cache_salt is not None


async def answer(
    engines: LocalEngines, request: GenerateRequest, handover: Handover | None = None
) -> list[int]:
    return tokens_of(await deltas_of(engines, request, handover))


async def deltas_of(
    engines: LocalEngines, request: GenerateRequest, handover: Handover | None
) -> list[Delta]:
    dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())
    return [delta async for delta in dispatcher.generate(request, handover)]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for one in deltas for choice in one.choices for token in choice.token_ids]
