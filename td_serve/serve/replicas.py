"""An engine as a replica: packed requests in, packed answers out, and a pulse for the directory.

Plain classes; `app` turns them into Serve deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol

from td_serve.errors import RequestError, Unavailable
from td_serve.metrics import Metrics
from td_serve.types import (
    Delta,
    Epoch,
    GenerateRequest,
    Handover,
    MemberHandover,
    ReplicaState,
    RequestId,
    RoundPrefill,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

PULSE_S = 1.0
"""Seconds between two registrations with the directory."""


class Host(Protocol):
    """What a replica needs of an engine (`engine.host.EngineHost`)."""

    async def prefill(self, request: GenerateRequest) -> Handover: ...

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]: ...

    def cancel_member(self, request_id: RequestId) -> None: ...

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]: ...

    async def release(self, handover: Handover) -> None: ...

    def state(self) -> ReplicaState: ...

    async def check_health(self) -> None: ...

    def close(self) -> None: ...


Register = Callable[[ReplicaState], Awaitable[Epoch]]


class EngineReplica:
    """Serves one engine, and registers it every second, so that a new directory learns of it.

    When the engine has died, so has this replica: it calls `leave`, which ends the process, so that
    requests go elsewhere at once and not only when Serve has asked three times for its health.
    """

    def __init__(
        self,
        host: Host,
        register: Register,
        metrics: Metrics,
        leave: Callable[[], None],
    ) -> None:
        self._host = host
        self._register = register
        self._leave = leave
        self._metrics = metrics
        self._epoch: Epoch | None = None
        self._pulse: asyncio.Task[None] | None = None

    async def prefill(self, packed: bytes) -> bytes:
        async with self._watching():
            return pack(await self._host.prefill(unpack(packed, GenerateRequest)))

    async def prefill_round(self, packed: bytes) -> AsyncGenerator[bytes, None]:
        parts = self._host.prefill_round(unpack(packed, RoundPrefill))
        async with self._watching(), contextlib.aclosing(parts):
            async for part in parts:
                yield pack(part)

    async def cancel_member(self, request_id: RequestId) -> None:
        self._host.cancel_member(request_id)

    async def decode(self, packed: bytes, handover: bytes | None) -> AsyncGenerator[bytes, None]:
        deltas = self._host.decode(
            unpack(packed, GenerateRequest),
            None if handover is None else unpack(handover, Handover),
        )
        async with self._watching(), contextlib.aclosing(deltas):
            async for delta in deltas:
                yield pack(delta)

    async def release(self, packed: bytes) -> None:
        await self._host.release(unpack(packed, Handover))

    async def check_health(self) -> None:
        """Leaves when the engine has died; Serve then replaces this replica."""
        self.start_pulse()
        await self._leave_if_dead()

    def start_pulse(self) -> None:
        """Begin to register. Needs a running event loop; calling it while it beats changes
        nothing."""
        if self._pulse is None or self._pulse.done():
            self._pulse = asyncio.get_running_loop().create_task(self._beat())

    def close(self) -> None:
        """Stop the engine and the pulse. The directory forgets this replica when it misses it."""
        if self._pulse is not None:
            self._pulse.cancel()
        self._host.close()

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """A call that fails may be the first to notice that the engine has died."""
        try:
            yield
        except Unavailable:
            await self._leave_if_dead()
            raise

    async def _leave_if_dead(self) -> None:
        try:
            await self._host.check_health()
        except RequestError as error:
            log.error("leaving: %s", error.message)
            self._leave()
            raise

    async def _beat(self) -> None:
        while True:
            await self._leave_if_dead()
            try:
                epoch = await self._register(self._host.state())
            except RequestError as error:
                log.warning("the directory does not answer: %s", error.message)
            else:
                if epoch != self._epoch:
                    log.info("registered with directory epoch %d", epoch)
                    self._metrics.directory_epoch.set(float(epoch))
                    self._epoch = epoch
            await asyncio.sleep(PULSE_S)
