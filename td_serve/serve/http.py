"""The HTTP side of the ingress: OpenAI's routes, and ours for rounds.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models
    /sim/{sim}/agent/{agent}/v1/…   the same three: the request joins the simulation's next round
    POST /v1/rounds                 a whole round at once
    GET  /v1/rounds/{sim}/{round}   the outputs on record    DELETE /v1/rounds/{sim}   forget them
    DELETE /v1/conversations/{id}   free what is kept for the next turn
    GET  /v1/replicas               who serves, and what it holds
    GET  /health

Where there are tenants, all but /health ask for an API key, before they read the body, and a
client reaches its own tenant's rounds and conversations only. A client that goes away cancels its
request in every engine. Errors have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
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
from td_serve.rounds import RoundField, decode_body
from td_serve.serve.playing import Records, play_round
from td_serve.tenants import Tenants, session
from td_serve.types import (
    AgentId,
    ConversationKey,
    Membership,
    Origin,
    ReplicaState,
    SessionId,
    TenantId,
)

MAX_BODY_BYTES = 64 * 2**20

SWITCH = "bidirectional_kv_xfer"
"""Field of a request's body: false has it leave nothing behind and read nothing back."""

_HEADERS: dict[int, dict[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
    # The openai client sends a conflict again by itself; it would only meet the same one.
    HTTPStatus.CONFLICT: {"x-should-retry": "false"},
}
"""What goes with a status."""


class Frontend(Protocol):
    """The OpenAI layer (`engine.openai.OpenAIFrontend`)."""

    @property
    def chat_parameters(self) -> frozenset[str]:
        """What a chat completion may say."""
        ...

    async def chat(self, body: dict[str, Any], origin: Origin) -> Reply: ...

    async def complete(self, body: dict[str, Any], origin: Origin) -> Reply: ...

    async def models(self) -> JsonReply: ...


class Rounds(Records, Protocol):
    """The coordinator, as far as the ingress talks to it."""

    async def forget(self, sim: SessionId) -> bool: ...

    async def excuse(self, membership: Membership) -> None: ...


class Directory(Protocol):
    async def replicas(self) -> list[ReplicaState]: ...


class Conversations(Protocol):
    """What is kept of conversations."""

    async def forget(self, conversation: ConversationKey) -> bool: ...


Answer = Callable[[dict[str, Any], Origin], Awaitable[Reply]]


def make_http_app(
    frontend: Frontend,
    coordinator: Rounds,
    directory: Directory,
    kept: Conversations,
    tenants: Tenants,
) -> FastAPI:
    """The ASGI application over the ingress's parts, for `tenants`."""
    app = FastAPI(title="td_serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)

    async def authenticate(request: Request) -> None:
        request.state.tenant = tenants.of(request.headers.get("authorization"))

    # What is asked here has a tenant: `_tenant` says whose it is.
    keyed = APIRouter(dependencies=[Depends(authenticate)])

    async def asked(
        answer: Answer,
        tenant: TenantId,
        body: dict[str, Any],
        membership: Membership | None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The answer; a member whose request is refused is no longer waited for by its round.

        With its `headers` a request may name a conversation.
        """
        try:
            is_kept = _is_kept(body)
            named = None if headers is None else conversation_of(headers, body)
            conversation = key(tenant, named) if is_kept and named is not None else None
            if membership is not None:
                membership = msgspec.structs.replace(membership, kept=is_kept)
            origin = Origin(tenant=tenant, membership=membership, conversation=conversation)
            reply = await answer(body, origin)
        except RequestError as error:
            reply = error_reply(error)
        if membership is not None and _is_refusal(reply):
            with contextlib.suppress(RequestError):
                await coordinator.excuse(membership)
        return reply

    async def plain(request: Request, answer: Answer) -> Response:
        body = await _body(request)
        field = body.pop("td_round", None)
        _check_ours(body)
        membership = None
        if field is not None:
            membership = decode_body(field, RoundField, "td_round").membership(_tenant(request))
        asking = asked(answer, _tenant(request), body, membership, request.headers)
        return await _send(request, asking)

    async def implied(request: Request, answer: Answer) -> Response:
        body = await _body(request)
        if "td_round" in body:
            raise BadRequest("td_round: the path already names the agent", field="td_round")
        _check_ours(body)
        membership = Membership(
            sim=session(_tenant(request), request.path_params["sim"]),
            agent=AgentId(request.path_params["agent"]),
        )
        asking = asked(answer, _tenant(request), body, membership, request.headers)
        return await _send(request, asking)

    @keyed.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await plain(request, frontend.chat)

    @keyed.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await plain(request, frontend.complete)

    @keyed.post("/sim/{sim:path}/agent/{agent:path}/v1/chat/completions")
    async def member_chat(request: Request) -> Response:
        return await implied(request, frontend.chat)

    @keyed.post("/sim/{sim:path}/agent/{agent:path}/v1/completions")
    async def member_completions(request: Request) -> Response:
        return await implied(request, frontend.complete)

    @keyed.get("/v1/models")
    @keyed.get("/sim/{sim:path}/agent/{agent:path}/v1/models")
    async def models() -> Response:
        return _json(await frontend.models())

    @keyed.post("/v1/rounds")
    async def play(request: Request) -> Response:
        round_ = rounds.read(await _body(request), frontend.chat_parameters)
        tenant = _tenant(request)
        chat = functools.partial(asked, frontend.chat, tenant)
        return await _send(request, play_round(tenant, round_, chat, coordinator))

    @keyed.get("/v1/rounds/{sim:path}/{number}")
    async def record(request: Request, sim: str, number: str) -> Response:
        if not (number.isascii() and number.isdecimal() and len(number) < 20):
            raise BadRequest(f"round: {number!r}, expected an integer", field="round")
        try:
            kept = await coordinator.record(session(_tenant(request), sim), int(number), 0.0)
        except RoundConflict as error:
            raise NotFound(
                f"round: the outputs of round {number} of sim {sim!r} are not on record here",
                field="round",
            ) from error
        return JSONResponse({**msgspec.to_builtins(kept), "sim": sim})

    @keyed.delete("/v1/rounds/{sim:path}")
    async def forget(request: Request, sim: str) -> Response:
        deleted = await coordinator.forget(session(_tenant(request), sim))
        return JSONResponse({"sim": sim, "deleted": deleted})

    @keyed.delete("/v1/conversations/{conversation:path}")
    async def forget_conversation(request: Request, conversation: str) -> Response:
        deleted = await kept.forget(key(_tenant(request), conversation))
        return JSONResponse({"conversation": conversation, "deleted": deleted})

    @keyed.get("/v1/replicas")
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

    app.include_router(keyed)
    return app


def _tenant(request: Request) -> TenantId:
    """Whose request it is. Of routes that ask for a key."""
    tenant: TenantId = request.state.tenant
    return tenant


def _check_ours(body: dict[str, Any]) -> None:
    """Nothing else begins as `td_round` does. Raises BadRequest."""
    for name in body:
        if name.startswith("td_"):
            raise BadRequest(f"{name}: unknown key, did you mean 'td_round'?", field=name)


def _is_kept(body: dict[str, Any]) -> bool:
    """Whether what is computed for a request may be kept for others, and what is kept be read.

    Mutates: takes the switch out of `body`. Raises BadRequest.
    """
    switch = body.pop(SWITCH, None)
    if switch is not None and not isinstance(switch, bool):
        raise BadRequest(f"{SWITCH}: {switch!r}, expected true or false", field=SWITCH)
    return switch is not False


def _is_refusal(reply: Reply) -> bool:
    """The request itself was at fault; a conflict is with a member that is there."""
    return (
        isinstance(reply, JsonReply)
        and HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
        and reply.status != HTTPStatus.CONFLICT
    )


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
    return JSONResponse(reply.body, status_code=reply.status, headers=_HEADERS.get(reply.status))


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error_reply(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not by this method: in OpenAI's shape too."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    reply = error_of(status, f"{request.method} {request.url.path}: {status.phrase.lower()}", None)
    return JSONResponse(reply.body, status_code=reply.status, headers=error.headers)
