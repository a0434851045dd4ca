"""A prefill engine's host, when a round comes as one unit: every member prefilled, one by one or by
a pass, and handed over as soon as it is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from td_serve.engine.outputs import Load, Outputs
from td_serve.engine.parts import private
from td_serve.engine.passes import Made, RoundPasses
from td_serve.engine.restoring import keep_parameters
from td_serve.engine.sparing import MOST_SESSIONS
from td_serve.errors import RequestError
from td_serve.types import (
    GenerateRequest,
    Handle,
    Handover,
    MemberHandover,
    PassSpec,
    RequestId,
    RoundPrefill,
    SessionId,
)

log = logging.getLogger(__name__)

Prefill = Callable[[GenerateRequest, Handle | None, Mapping[str, Any]], Awaitable[Handover]]
"""An ordinary prefill, which may read what a handle names, with these KV transfer parameters."""
_Making = asyncio.Future[dict[RequestId, Made]]


class Members:
    """The members of all rounds under way on one engine."""

    def __init__(self, prefill: Prefill, load: Load, passes: RoundPasses, outputs: Outputs) -> None:
        self._prefill = prefill
        self._load = load
        self._passes = passes
        self._outputs = outputs
        self._tasks: dict[RequestId, asyncio.Future[Handover]] = {}
        self._told: deque[SessionId] = deque(maxlen=MOST_SESSIONS)
        """Sessions of which the log has said already that they share more than the window."""

    async def play(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        """See `EngineHost.prefill_round`."""
        self._passes.give_way([spec.canonical for spec in work.passes])
        if work.histories:
            await self._passes.why_none()  # or it would not be known how to keep them
        name = f"round {work.plan.round} of session {work.plan.sim!r}"
        passes = [
            (spec, asyncio.ensure_future(self._make(spec, work.turns, name)))
            for spec in work.passes
            if self._fits(spec, work.plan.sim)
        ]
        making = {member.request_id: made for spec, made in passes for member in spec.members}
        histories = dict(work.histories)
        for spec in work.passes:
            histories |= {one.request_id: one.history for one in spec.members if one.history}
        # How a prompt begins is exact however it ends: what stands before all that is shared.
        exact = {one.request_id: private(one) for spec in work.passes for one in spec.members}
        tasks = {
            asyncio.ensure_future(
                self._one(
                    request,
                    work.handles.get(request.request_id),
                    making.get(request.request_id),
                    histories.get(request.request_id),
                    exact.get(request.request_id),
                )
            ): request.request_id
            for request in work.requests
        }
        self._tasks.update((request_id, task) for task, request_id in tasks.items())
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield self._part(tasks.pop(task), task)
        finally:
            for task, request_id in tasks.items():
                self._tasks.pop(request_id, None)
                task.cancel()
            for spec, made in passes:
                # Members that left while it ran have never asked for what it made for them.
                self._passes.give_up(spec, made)

    def cancel(self, request_id: RequestId) -> None:
        """Abort a member's prefill, if it is under way here."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def _fits(self, spec: PassSpec, sim: SessionId) -> bool:
        """Whether the model's window holds what a pass computes for all. Where it does not, the log
        says so, once for a session."""
        fits = self._passes.fits(spec.canonical)
        if not fits and self._passes.known_why is None and sim not in self._told:
            self._told.append(sim)
            log.info(
                "session %r: rounds whose members share more than the model's window holds are "
                "prefilled as they are: these share %d tokens",
                sim,
                len(spec.canonical.token_ids),
            )
        return fits

    async def _make(
        self, spec: PassSpec, turns: Mapping[str, Handle], name: str
    ) -> dict[RequestId, Made]:
        """Run a pass, with what can be read of what is written elsewhere."""
        if not spec.written or not await self._passes.will_make(spec):
            return await self._passes.make(spec, name)
        async with self._outputs.of(spec, turns, name) as written:
            return await self._passes.make(msgspec.structs.replace(spec, written=written), name)

    async def _one(
        self,
        request: GenerateRequest,
        handle: Handle | None,
        making: _Making | None,
        history: str | None,
        exact: int | None,
    ) -> Handover:
        """Prefill a member; `making` is its pass, which is the other members' too.

        What is computed of its prompt is kept under the name `history`; where a pass would have
        made it, `exact` of its first tokens.
        """
        made = None
        if making is not None:
            made = (await asyncio.shield(making)).get(request.request_id)
        if made is None:
            keeping = {} if history is None else keep_parameters(history, exact)
            return await self._prefill(request, handle, keeping)
        salt = made.salt(request)
        try:
            handover = await self._load(
                msgspec.structs.replace(request, cache_salt=salt),
                {**made.parameters(), **({} if history is None else keep_parameters(history))},
            )
        finally:
            self._passes.release(made.name)
        # What was not there any more when it was to be loaded the engine has computed.
        spared = min(handover.cached_tokens, made.counted.local + made.counted.reused)
        blended = made.counted if handover.cached_tokens else None
        return msgspec.structs.replace(
            handover, cached_tokens=spared, cache_salt=salt, blended=blended
        )

    def _part(self, request_id: RequestId, task: asyncio.Future[Handover]) -> MemberHandover:
        """What has become of a member whose task is done."""
        self._tasks.pop(request_id, None)
        if task.cancelled():
            return MemberHandover(request_id=request_id, error="cancelled")
        try:
            return MemberHandover(request_id=request_id, handover=task.result())
        except RequestError as error:
            return MemberHandover(request_id=request_id, error=error.message)
