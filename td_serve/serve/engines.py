"""The prefill and decode replicas of a deployment, reached over Ray Serve handles.

Ray carries packed wire structs: ids, plans, tokens and text, never tensors. Its failures become
ours here: a replica that is gone, or not there yet, is Unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from td_serve.errors import EngineFailure, RequestError, Unavailable
from td_serve.types import (
    Delta,
    GenerateRequest,
    Handover,
    M,
    MemberHandover,
    RoundPrefill,
    pack,
    unpack,
)

T = TypeVar("T")
LostPrefill = Callable[[Handover], None]


class RayEngines:
    """`dispatch.Engines` over the handles of the two kinds of replica."""

    def __init__(self, prefill: DeploymentHandle, decode: DeploymentHandle) -> None:
        self._prefill = prefill
        self._decode = decode
        self._lost: set[asyncio.Task[None]] = set()

    async def prefill(self, request: GenerateRequest) -> Handover:
        response = self._prefill.prefill.remote(pack(request))
        try:
            return unpack(await reply(response), Handover)
        except asyncio.CancelledError:
            response.cancel()
            self._watch(response)
            raise

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        stream = self._prefill.options(stream=True).prefill_round.remote(pack(work))
        return replies(stream, MemberHandover)

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        packed = None if handover is None else pack(handover)
        stream = self._decode.options(stream=True).decode.remote(pack(request), packed)
        return replies(stream, Delta)

    async def release(self, handover: Handover) -> None:
        await reply(self._decode.release.remote(pack(handover)))

    def _watch(self, response: DeploymentResponse) -> None:
        """A prefill that was cancelled may have won the race: then give its blocks back."""
        task = asyncio.get_running_loop().create_task(self._release_if_done(response))
        self._lost.add(task)
        task.add_done_callback(self._lost.discard)

    async def _release_if_done(self, response: DeploymentResponse) -> None:
        with contextlib.suppress(RequestError, asyncio.CancelledError):
            await self.release(unpack(await reply(response), Handover))


async def reply(response: Awaitable[T]) -> T:
    """What a replica answered. Raises a RequestError of ours for whatever went wrong."""
    with translated():
        return await response


async def replies(stream: DeploymentResponseGenerator, kind: type[M]) -> AsyncGenerator[M, None]:
    """What a replica streams, unpacked. Closing it cancels the call in the replica."""
    finished = False
    try:
        with translated():
            async for packed in stream:
                yield unpack(packed, kind)
        finished = True
    finally:
        if not finished:
            stream.cancel()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Ray's errors as ours. Errors of ours that a replica raised come out as they were."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RequestError):
            raise error.cause from None
        raise EngineFailure(f"a replica failed: {error.cause!r}") from error
    except (RequestCancelledError, TaskCancelledError) as error:
        raise Unavailable("the call was cancelled in the replica") from error
    except (RayServeException, RayError) as error:
        # Dead actors and nodes, deployments without replicas, queues that are full.
        raise Unavailable(f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
