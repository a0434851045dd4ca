"""The prefill and decode replicas of a deployment, reached over Ray Serve handles.

Ray carries packed wire structs: ids, plans, tokens and text, never tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ray.serve.handle import DeploymentHandle, DeploymentResponse

from td_serve.errors import RequestError
from td_serve.serve.calls import answer, ask, start, stream, tell_all
from td_serve.types import (
    Delta,
    GenerateRequest,
    Handover,
    MemberHandover,
    RequestId,
    RoundPrefill,
    pack,
    unpack,
)


class RayEngines:
    """`dispatch.Engines` over the handles of the two kinds of replica."""

    def __init__(self, prefill: DeploymentHandle, decode: DeploymentHandle) -> None:
        self._prefill = prefill
        self._decode = decode
        self._watched: set[asyncio.Task[None]] = set()

    async def prefill(self, request: GenerateRequest) -> Handover:
        response = start(self._prefill.prefill, pack(request))
        try:
            return unpack(await answer(response), Handover)
        except asyncio.CancelledError:
            response.cancel()
            self._watch(response)
            raise

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        return stream(self._prefill.prefill_round, MemberHandover, pack(work))

    async def cancel_member(self, request_id: RequestId) -> None:
        await tell_all(self._prefill, "cancel_member", request_id)

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        packed = None if handover is None else pack(handover)
        return stream(self._decode.decode, Delta, pack(request), packed)

    async def release(self, handover: Handover) -> None:
        await ask(self._decode.release, pack(handover))

    def _watch(self, response: DeploymentResponse) -> None:
        """A prefill that was cancelled may have won the race: then give its blocks back."""
        task = asyncio.get_running_loop().create_task(self._release_if_done(response))
        self._watched.add(task)
        task.add_done_callback(self._watched.discard)

    async def _release_if_done(self, response: DeploymentResponse) -> None:
        with contextlib.suppress(RequestError, asyncio.CancelledError):
            await self.release(unpack(await answer(response), Handover))
