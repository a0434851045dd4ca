"""The HTTP side of the ingress: OpenAI's routes, and ours for rounds.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models
    /sim/{sim}/agent/{agent}/v1/…   the same three: the request joins the simulation's next round
    POST /v1/rounds                 a whole round at once
    GET  /v1/rounds/{sim}/{round}   the outputs on record    DELETE /v1/rounds/{sim}   forget them
    DELETE /v1/conversations/{id}   free what is kept for the next turn
    GET  /v1/replicas               who serves, and what it holds
    GET  /health

A client that goes away cancels its request in every engine. Errors have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from td_serve import rounds
from td_serve.conversations import conversation_of, key
from td_serve.errors import (
    BadRequest,
    NotFound,
    RequestError,
    RoundConflict,
    TooLarge,
    Unavailable,
)
from td_serve.replies import JsonReply, Reply, StreamReply, error_of, error_reply
from td_serve.rounds import RoundField, RoundRequest, decode_body
from td_serve.types import (
    AgentId,
    AgentOutput,
    ConversationKey,
    Membership,
    Origin,
    ReplicaState,
    RoundRecord,
    SessionId,
)

T = TypeVar("T")
MAX_BODY_BYTES = 64 * 2**20

SWITCH = "bidirectional_kv_xfer"
"""Field of a request's body: false has it leave nothing behind and read nothing back."""

TENANT = ""
"""All clients are one tenant's."""


class Frontend(Protocol):
    """The OpenAI layer (`engine.openai.OpenAIFrontend`)."""

    async def chat(self, body: dict[str, Any], origin: Origin) -> Reply: ...

    async def complete(self, body: dict[str, Any], origin: Origin) -> Reply: ...

    async def models(self) -> JsonReply: ...


class Rounds(Protocol):
    """The coordinator, as far as the ingress talks to it."""

    async def record(self, sim: SessionId, number: int, patience_s: float) -> RoundRecord: ...

    async def forget(self, sim: SessionId) -> bool: ...

    async def excuse(self, membership: Membership) -> None: ...


class Directory(Protocol):
    async def replicas(self) -> list[ReplicaState]: ...


class Conversations(Protocol):
    """What is kept of conversations."""

    async def forget(self, conversation: ConversationKey) -> bool: ...


Answer = Callable[[dict[str, Any], Origin], Awaitable[Reply]]

RECORD_PATIENCE_S = 60.0
"""How long a round waits for the last one's members to finish, when it names no deadline."""


def make_http_app(
    frontend: Frontend, coordinator: Rounds, directory: Directory, kept: Conversations
) -> FastAPI:
    """The ASGI application over the ingress's parts."""
    app = FastAPI(title="td_serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)

    async def asked(
        answer: Answer,
        body: dict[str, Any],
        membership: Membership | None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The answer; a member whose request is refused is no longer waited for by its round.

        With its `headers` a request may name a conversation.
        """
        try:
            conversation = None if headers is None else _conversation(headers, body)
            reply = await answer(body, Origin(membership=membership, conversation=conversation))
        except RequestError as error:
            reply = error_reply(error)
        if membership is not None and _is_refusal(reply):
            with contextlib.suppress(RequestError):
                await coordinator.excuse(membership)
        return reply

    async def plain(request: Request, answer: Answer) -> Response:
        body = await _body(request)
        field = body.pop("td_round", None)
        membership = None
        if field is not None:
            membership = decode_body(field, RoundField, "td_round").membership()
        return await _send(request, asked(answer, body, membership, request.headers))

    async def implied(request: Request, answer: Answer) -> Response:
        body = await _body(request)
        if "td_round" in body:
            raise BadRequest("td_round: the path already names the agent", field="td_round")
        membership = Membership(
            sim=SessionId(request.path_params["sim"]), agent=AgentId(request.path_params["agent"])
        )
        return await _send(request, asked(answer, body, membership, request.headers))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await plain(request, frontend.chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await plain(request, frontend.complete)

    @app.post("/sim/{sim:path}/agent/{agent:path}/v1/chat/completions")
    async def member_chat(request: Request) -> Response:
        return await implied(request, frontend.chat)

    @app.post("/sim/{sim:path}/agent/{agent:path}/v1/completions")
    async def member_completions(request: Request) -> Response:
        return await implied(request, frontend.complete)

    @app.get("/v1/models")
    @app.get("/sim/{sim:path}/agent/{agent:path}/v1/models")
    async def models() -> Response:
        return _json(await frontend.models())

    @app.post("/v1/rounds")
    async def play(request: Request) -> Response:
        round_ = decode_body(await _body(request), RoundRequest)
        rounds.check(round_)
        chat = functools.partial(asked, frontend.chat)
        return await _send(request, _play_round(round_, chat, coordinator))

    @app.get("/v1/rounds/{sim:path}/{number}")
    async def record(sim: str, number: str) -> Response:
        if not (number.isascii() and number.isdecimal() and len(number) < 20):
            raise BadRequest(f"round: {number!r}, expected an integer", field="round")
        try:
            kept = await coordinator.record(SessionId(sim), int(number), 0.0)
        except RoundConflict as error:
            raise NotFound(error.message, field="round") from error
        return JSONResponse(msgspec.to_builtins(kept))

    @app.delete("/v1/rounds/{sim:path}")
    async def forget(sim: str) -> Response:
        return JSONResponse({"sim": sim, "deleted": await coordinator.forget(SessionId(sim))})

    @app.delete("/v1/conversations/{conversation:path}")
    async def forget_conversation(conversation: str) -> Response:
        deleted = await kept.forget(key(TENANT, conversation))
        return JSONResponse({"conversation": conversation, "deleted": deleted})

    @app.get("/v1/replicas")
    async def replicas() -> Response:
        return JSONResponse(
            {"replicas": [msgspec.to_builtins(state) for state in await directory.replicas()]}
        )

    @app.get("/health")
    async def health() -> Response:
        roles = {state.role for state in await directory.replicas()}
        if missing := {"prefill", "decode"} - roles:
            raise Unavailable(f"no {' and no '.join(sorted(missing))} replica is registered")
        return JSONResponse({"status": "ok"})

    return app


def _conversation(headers: Mapping[str, str], body: dict[str, Any]) -> ConversationKey | None:
    """The conversation whose KV is kept, if the client names one and does not forbid it.

    Mutates: takes the switch out of `body`. Raises BadRequest.
    """
    switch = body.pop(SWITCH, None)
    if switch is not None and not isinstance(switch, bool):
        raise BadRequest(f"{SWITCH}: {switch!r}, expected true or false", field=SWITCH)
    named = conversation_of(headers, body)
    return None if named is None or switch is False else key(TENANT, named)


def _is_refusal(reply: Reply) -> bool:
    """The request itself was at fault; a conflict is with a member that is there."""
    return (
        isinstance(reply, JsonReply)
        and HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
        and reply.status != HTTPStatus.CONFLICT
    )


async def _play_round(
    round_: RoundRequest,
    chat: Callable[[dict[str, Any], Membership], Awaitable[Reply]],
    coordinator: Rounds,
) -> Reply:
    """Every agent's completion, and the round's sums; streamed as agents finish, if wanted."""
    shared, complete = await _shared(round_, coordinator)
    rounds.check_filled(round_, shared)
    sums = functools.partial(_round_sums, round_, shared, complete)

    async def one(position: int) -> dict[str, Any]:
        # Composed here and not for all at once: the shared text goes into every prompt.
        body = {
            **round_.completion,
            "model": round_.model,
            "messages": rounds.messages(round_, round_.agents[position], shared),
        }
        reply = await chat(body, rounds.membership(round_, position))
        assert isinstance(reply, JsonReply), "a request without `stream` got a stream"
        key = "response" if reply.status < 400 else "error"
        body = reply.body if key == "response" else reply.body["error"]
        return {"agent": round_.agents[position].agent, key: body}

    results = _as_finished([one(position) for position in range(len(round_.agents))])
    if round_.stream:
        return StreamReply(_round_events(sums, results))
    async with contextlib.aclosing(results):
        parts = [result async for result in results]
    return JsonReply(_status(parts), {**sums(parts), "results": parts})


def _status(parts: list[dict[str, Any]]) -> int:
    """200, unless every member failed, and all for the same kind of reason."""
    statuses = {part["error"]["code"] if "error" in part else HTTPStatus.OK for part in parts}
    return int(statuses.pop()) if len(statuses) == 1 else int(HTTPStatus.OK)


async def _shared(round_: RoundRequest, coordinator: Rounds) -> tuple[list[AgentOutput], bool]:
    """The last round's outputs: as handed in, else as recorded; and whether those are all.

    Round 0 has none.
    """
    if round_.shared is not None:
        given = [AgentOutput(agent=AgentId(one.agent), text=one.text) for one in round_.shared]
        return given, True
    if round_.round == 0:
        return [], True
    patience = RECORD_PATIENCE_S if round_.deadline_ms is None else round_.deadline_ms / 1000
    record = await coordinator.record(SessionId(round_.sim), round_.round - 1, patience)
    return record.outputs, record.complete


async def _round_events(
    sums: Callable[[list[dict[str, Any]]], dict[str, Any]],
    results: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[str, None]:
    parts = []
    async with contextlib.aclosing(results):
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


async def _body(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise TooLarge(f"body: more than {MAX_BODY_BYTES} bytes, which is the most")
    try:
        # Unlike `json`, this refuses what no other process could take: NaN, lone surrogates.
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"body: a {type(body).__name__}, expected a JSON object")
    return body


async def _send(request: Request, answer: Awaitable[Reply]) -> Response:
    """The reply, unless the client goes away first: then the work for it is cancelled."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        reply = work.result()
    finally:
        gone.cancel()
        work.cancel()
    if isinstance(reply, StreamReply):
        return StreamingResponse(reply.events, media_type="text/event-stream")
    return _json(reply)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(reply: JsonReply) -> Response:
    # The openai client sends a conflict again by itself; it would only meet the same one.
    headers = {"x-should-retry": "false"} if reply.status == HTTPStatus.CONFLICT else None
    return JSONResponse(reply.body, status_code=reply.status, headers=headers)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error_reply(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not by this method: in OpenAI's shape too."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    reply = error_of(status, f"{request.method} {request.url.path}: {status.phrase.lower()}", None)
    return JSONResponse(reply.body, status_code=reply.status, headers=error.headers)
