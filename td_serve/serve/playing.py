"""A whole round in one request (`POST /v1/rounds`): every agent asked, the answers put together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from td_serve import rounds
from td_serve.replies import JsonReply, Reply, StreamReply
from td_serve.rounds import RoundRequest
from td_serve.tenants import session
from td_serve.types import AgentId, AgentOutput, Membership, RoundRecord, SessionId, TenantId

T = TypeVar("T")

RECORD_PATIENCE_S = 60.0
"""How long a round waits for the last one's members to finish, when it names no deadline."""


class Records(Protocol):
    """What was put out in past rounds."""

    async def record(self, sim: SessionId, number: int, patience_s: float) -> RoundRecord: ...


async def play_round(
    tenant: TenantId,
    round_: RoundRequest,
    chat: Callable[[dict[str, Any], Membership], Awaitable[Reply]],
    records: Records,
) -> Reply:
    """Every agent's completion, and the round's sums; streamed as agents finish, if wanted, and if
    not every one of them fails.

    `chat` asks for one agent's. Raises RequestError where none could be asked for.
    """
    shared, complete = await _shared(tenant, round_, records)
    rounds.check_filled(round_, shared)
    sums = functools.partial(_round_sums, round_, shared, complete)

    async def one(position: int) -> dict[str, Any]:
        # Composed here and not for all at once: the shared text goes into every prompt.
        body = {
            **round_.completion,
            "model": round_.model,
            "messages": rounds.messages(round_, round_.agents[position], shared),
        }
        reply = await chat(body, rounds.membership(tenant, round_, position))
        assert isinstance(reply, JsonReply), "a request without `stream` got a stream"
        key = "response" if reply.status < 400 else "error"
        body = reply.body if key == "response" else reply.body["error"]
        return {"agent": round_.agents[position].agent, key: body}

    results = _as_finished([one(position) for position in range(len(round_.agents))])
    parts = []
    async for result in results:
        parts.append(result)
        if round_.stream and _status(parts) == HTTPStatus.OK:
            # Whatever the others come to: before that, the round may still fail as one.
            return StreamReply(_round_events(sums, parts, results))
    return JsonReply(_status(parts), {**sums(parts), "results": parts})


def _status(parts: list[dict[str, Any]]) -> int:
    """200, unless every member failed, and all for the same kind of reason."""
    statuses = {part["error"]["code"] if "error" in part else HTTPStatus.OK for part in parts}
    return int(statuses.pop()) if len(statuses) == 1 else int(HTTPStatus.OK)


async def _shared(
    tenant: TenantId, round_: RoundRequest, records: Records
) -> tuple[list[AgentOutput], bool]:
    """The last round's outputs: as handed in, else as recorded; and whether those are all.

    Round 0 has none.
    """
    if round_.shared is not None:
        given = [AgentOutput(agent=AgentId(one.agent), text=one.text) for one in round_.shared]
        return given, True
    if round_.round == 0:
        return [], True
    patience = RECORD_PATIENCE_S if round_.deadline_ms is None else round_.deadline_ms / 1000
    record = await records.record(session(tenant, round_.sim), round_.round - 1, patience)
    return record.outputs, record.complete


async def _round_events(
    sums: Callable[[list[dict[str, Any]]], dict[str, Any]],
    parts: list[dict[str, Any]],
    results: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[str, None]:
    """What has come already, `parts`, and what is to come."""
    async with contextlib.aclosing(results):
        for part in parts:
            yield _event(part)
        async for result in results:
            parts.append(result)
            yield _event(result)
    yield _event(sums(parts))
    yield "data: [DONE]\n\n"


def _round_sums(
    round_: RoundRequest,
    shared: list[AgentOutput],
    complete: bool,
    results: list[dict[str, Any]],
) -> dict[str, Any]:
    usages = [result["response"]["usage"] for result in results if "response" in result]
    return {
        "object": "round",
        "sim": round_.sim,
        "round": round_.round,
        "agents": len(results),
        "failed": len(results) - len(usages),
        "shared": [output.agent for output in shared if output.text],
        "shared_complete": complete,
        "usage": {
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
            "completion_tokens": sum(usage["completion_tokens"] for usage in usages),
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
            "prompt_tokens_details": {
                "cached_tokens": sum(
                    (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                    for usage in usages
                )
            },
        },
    }


async def _as_finished(
    work: list[Coroutine[Any, Any, T]],
) -> AsyncGenerator[T, None]:
    """Results as they come. Closing it cancels what is left."""
    pending = {asyncio.ensure_future(one) for one in work}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in pending:
            task.cancel()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
