"""An engine as a replica: packed requests in, packed answers out, and a pulse for the directory.

Plain classes; `app` turns them into Serve deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Protocol

import msgspec

from td_serve.errors import RequestError, Unavailable
from td_serve.leases import End, LeaseCounts
from td_serve.metrics import Metrics
from td_serve.types import (
    ConversationKey,
    Delta,
    Epoch,
    Forecast,
    GenerateRequest,
    Handle,
    Handover,
    LeaseId,
    MemberHandover,
    Read,
    ReaderId,
    Registered,
    ReplicaId,
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

    async def prefill(self, request: GenerateRequest, handle: Handle | None = None) -> Handover: ...

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]: ...

    async def prepare(self, forecast: Forecast) -> None: ...

    def cancel_member(self, request_id: RequestId) -> None: ...

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]: ...

    async def release(self, handover: Handover) -> None: ...

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool: ...

    async def let_go(self, handle: Handle, reader: ReaderId) -> None: ...

    async def forget(self, conversation: ConversationKey) -> bool: ...

    async def end_lease(self, lease: LeaseId) -> None: ...

    async def lease_counts(self) -> LeaseCounts: ...

    def take_reads(self) -> list[Read]: ...

    def state(self) -> ReplicaState: ...

    async def check_health(self) -> None: ...

    async def why_no_passes(self) -> str | None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class Directory(Protocol):
    """The directory, as a replica talks to it. Each answers with, or raises, as `KVDirectory`."""

    async def register(self, state: ReplicaState) -> Registered: ...

    async def keep(self, handle: Handle) -> None: ...

    async def drop(self, handles: list[Handle]) -> None: ...


class EngineReplica:
    """Serves one engine, and registers it every second, so that a new directory learns of it, and
    of all that the engine keeps.

    When the engine has died, so has this replica: it calls `leave`, which ends the process, so that
    requests go elsewhere at once and not only when Serve has asked three times for its health.
    """

    def __init__(
        self,
        host: Host,
        directory: Directory,
        metrics: Metrics,
        leave: Callable[[], None],
    ) -> None:
        self._host = host
        self._directory = directory
        self._kept: dict[LeaseId, Handle] = {}
        self._newest: dict[ConversationKey, LeaseId] = {}
        self._ends: Counter[End] = Counter()
        self._leave = leave
        self._metrics = metrics
        self._epoch: Epoch | None = None
        self._pulse: asyncio.Task[None] | None = None

    async def prefill(self, packed: bytes, handle: bytes | None = None) -> bytes:
        known = None if handle is None else unpack(handle, Handle)
        async with self._watching():
            handover = await self._host.prefill(unpack(packed, GenerateRequest), known)
        self._count(handover.read)
        return pack(handover)

    async def prefill_round(self, packed: bytes) -> AsyncGenerator[bytes, None]:
        work = unpack(packed, RoundPrefill)
        planned = {member.request_id for spec in work.passes for member in spec.members}
        parts = self._host.prefill_round(work)
        async with self._watching(), contextlib.aclosing(parts):
            async for part in parts:
                self._count_part(part, planned)
                for read in self._host.take_reads():
                    self._count(read)
                yield pack(part)

    async def prepare(self, packed: bytes, asked: ReplicaId) -> None:
        """For the replica that was asked only: another has nothing of that session."""
        if asked == self._host.state().replica:
            async with self._watching():
                await self._host.prepare(unpack(packed, Forecast))

    async def cancel_member(self, request_id: RequestId) -> None:
        self._host.cancel_member(request_id)

    async def decode(self, packed: bytes, handover: bytes | None) -> AsyncGenerator[bytes, None]:
        request = unpack(packed, GenerateRequest)
        deltas = self._host.decode(
            request, None if handover is None else unpack(handover, Handover)
        )
        async with self._watching(), contextlib.aclosing(deltas):
            async for delta in deltas:
                if delta.handle is not None:
                    # Before the client has its answer: its next turn may be quick.
                    await self._keep(delta.handle)
                    if request.writes is None:
                        delta = msgspec.structs.replace(delta, handle=None)
                yield pack(delta)

    async def release(self, packed: bytes) -> None:
        await self._host.release(unpack(packed, Handover))

    async def hold(self, packed: bytes, reader: ReaderId, for_s: float) -> bool:
        return await self._host.hold(unpack(packed, Handle), reader, for_s)

    async def let_go(self, packed: bytes, reader: ReaderId) -> None:
        await self._host.let_go(unpack(packed, Handle), reader)

    async def forget(self, conversation: ConversationKey) -> bool:
        return await self._host.forget(conversation)

    async def check_health(self) -> None:
        """Leaves when the engine has died; Serve then replaces this replica."""
        self.start_pulse()
        await self._leave_if_dead()

    def start_pulse(self) -> None:
        """Begin to register. Needs a running event loop; calling it while it beats changes
        nothing."""
        if self._pulse is None or self._pulse.done():
            self._pulse = asyncio.get_running_loop().create_task(self._beat())

    async def drain(self) -> None:
        """Before it is closed, a replica lets those finish who read from its engine."""
        try:
            await self._host.drain()
        except RequestError as error:
            log.warning("draining: %s", error.message)

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
        with contextlib.suppress(RequestError):  # of a dead engine the first beat tells
            if (why := await self._host.why_no_passes()) is not None:
                log.warning("members of rounds are prefilled one by one: %s", why)
        while True:
            await self._leave_if_dead()
            try:
                known = await self._directory.register(self._host.state())
                for lease in known.superseded:
                    await self._host.end_lease(lease)
                live = await self._drop_ended()
                if known.epoch != self._epoch:
                    await self._tell(live)
                    log.info("registered with directory epoch %d", known.epoch)
                    self._metrics.directory_epoch.set(float(known.epoch))
                    self._epoch = known.epoch
            except RequestError as error:
                log.warning("the pulse: %s", error.message)
            await asyncio.sleep(PULSE_S)

    async def _keep(self, handle: Handle) -> None:
        """Tell the directory of a lease; if it cannot be told now, it will be by the pulse."""
        self._kept[handle.lease] = handle
        self._newest[handle.conversation] = handle.lease
        try:
            await self._directory.keep(handle)
        except RequestError as error:
            log.warning("the directory does not answer: %s", error.message)
            self._epoch = None
        except asyncio.CancelledError:
            self._epoch = None  # it may not have been told
            raise

    def _count_part(self, part: MemberHandover, planned: set[RequestId]) -> None:
        """`planned` are the members that a pass was to prefill."""
        self._count(None if part.handover is None else part.handover.read)
        if part.request_id in planned:
            counted = None if part.handover is None else part.handover.blended
            if counted is None:
                self._metrics.not_blended.inc()
            else:
                self._metrics.count_blended(counted)

    def _count(self, read: Read | None) -> None:
        if read is None:
            return
        if read.failed:
            self._metrics.reads_failed.inc()
            return
        self._metrics.reads.inc()
        self._metrics.tokens_read.inc(read.tokens)
        self._metrics.bytes_read.inc(read.bytes)

    async def _tell(self, live: Mapping[LeaseId, float]) -> None:
        """Tell the directory of all that is kept, and for how many seconds more."""
        for handle in list(self._kept.values()):
            if self._newest.get(handle.conversation) != handle.lease:
                continue  # a turn has ended since: the directory knows of that one
            left = live.get(handle.lease, handle.remaining_s)  # it may have come just now
            await self._directory.keep(msgspec.structs.replace(handle, remaining_s=left))

    async def _drop_ended(self) -> Mapping[LeaseId, float]:
        """Forget the leases that have ended, here and in the directory. Gives those that live."""
        before = list(self._kept.values())
        counts = await self._host.lease_counts()
        self._metrics.leases.set(float(len(counts.live)))
        for why, number in (Counter(counts.ends) - self._ends).items():
            self._metrics.lease_ends[why].inc(float(number))
        self._ends = Counter(counts.ends)
        if ended := [handle for handle in before if handle.lease not in counts.live]:
            await self._directory.drop(ended)
            for handle in ended:
                del self._kept[handle.lease]
                if self._newest.get(handle.conversation) == handle.lease:
                    del self._newest[handle.conversation]
        return counts.live
