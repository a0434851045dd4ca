"""The prefill and decode replicas of a deployment, reached over Ray Serve handles.

Ray carries packed wire structs: ids, plans, tokens and text, never tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator

import msgspec
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from td_serve.errors import RequestError
from td_serve.serve.calls import answer, ask, ask_all, start, stream
from td_serve.serve.remotes import RemoteDirectory, RemoteKeeper
from td_serve.serve.routing import towards
from td_serve.tasks import Tasks
from td_serve.types import (
    ConversationKey,
    Delta,
    Forecast,
    GenerateRequest,
    Handle,
    Handover,
    MemberHandover,
    ReplicaId,
    RequestId,
    RoundPrefill,
    SessionId,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

_MOST_SESSIONS = 4096


class RayEngines:
    """`dispatch.Engines` over the handles of the two kinds of replica, and of the directory.

    A turn of a conversation goes to the prefill replica that had the last one, with the handle of
    what the decode replica keeps, and to that decode replica. Rounds of a session go to the prefill
    replica that had the last one: it keeps histories, and what has been shared.
    """

    def __init__(
        self, prefill: DeploymentHandle, decode: DeploymentHandle, directory: DeploymentHandle
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._directory = RemoteDirectory(directory)
        self._watched = Tasks()
        self._had: OrderedDict[SessionId, ReplicaId] = OrderedDict()

    async def prefill(self, request: GenerateRequest) -> Handover:
        handle = await self._find(request.conversation)
        prefill = towards(self._prefill, None if handle is None else handle.prefilled_by)
        response = start(prefill.prefill, pack(request), None if handle is None else pack(handle))
        try:
            return unpack(await answer(response), Handover)
        except asyncio.CancelledError:
            response.cancel()
            self._watch(response)
            raise

    async def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        found = await asyncio.gather(*(self._find(one.conversation) for one in work.requests))
        handles = {
            str(request.request_id): handle
            for request, handle in zip(work.requests, found, strict=True)
            if handle is not None
        }
        work = msgspec.structs.replace(work, handles=handles)
        sim = work.plan.sim
        prefill = towards(self._prefill, self._had.get(sim))
        parts = stream(prefill.prefill_round, MemberHandover, pack(work))
        async with contextlib.aclosing(parts):
            async for part in parts:
                if part.handover is not None:
                    self._remember(sim, part.handover.replica)
                yield part

    async def prepare(self, forecast: Forecast) -> None:
        if (replica := self._had.get(forecast.sim)) is not None:
            await ask(towards(self._prefill, replica).prepare, pack(forecast), replica)

    async def cancel_member(self, request_id: RequestId) -> None:
        await ask_all(self._prefill, "cancel_member", request_id)

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        packed = None if handover is None else pack(handover)
        decode = towards(self._decode, None if handover is None else handover.kept_by)
        return stream(decode.decode, Delta, pack(request), packed)

    async def release(self, handover: Handover) -> None:
        await ask(self._decode.release, pack(handover))

    async def forget(self, conversation: ConversationKey) -> bool:
        return await RemoteKeeper(self._decode).forget(conversation)

    async def _find(self, conversation: ConversationKey | None) -> Handle | None:
        """The conversation's handle, if the directory knows one, and can be asked."""
        if conversation is None:
            return None
        try:
            return await self._directory.find(conversation)
        except RequestError as error:
            log.warning("the directory does not answer: %s", error.message)
            return None

    def _remember(self, sim: SessionId, replica: ReplicaId) -> None:
        self._had[sim] = replica
        self._had.move_to_end(sim)
        if len(self._had) > _MOST_SESSIONS:
            self._had.popitem(last=False)

    def _watch(self, response: DeploymentResponse) -> None:
        """A prefill that was cancelled may have won the race: then give its blocks back."""
        self._watched.run(self._release_if_done(response))

    async def _release_if_done(self, response: DeploymentResponse) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self.release(unpack(await answer(response), Handover))
