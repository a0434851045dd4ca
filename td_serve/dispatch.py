"""One request's way: prefill, hand over, decode.

The dispatcher owns a handover from the moment that prefill returns it until the decode engine says
that it is admitted; if anything ends the request in between, it gives the handover up, so that the
prefill engine's blocks are freed at once and not only when their lease ends.

A request that has put out nothing yet may be tried again from the start (prefill finds its own
prefix cache); one that has is failed clearly: its client already holds tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from td_serve.config import DispatchSettings
from td_serve.errors import EngineFailure, Unavailable
from td_serve.metrics import Metrics
from td_serve.tasks import Tasks
from td_serve.types import (
    ConversationKey,
    Delta,
    Forecast,
    GenerateRequest,
    Handover,
    MemberHandover,
    RequestId,
    RoundPrefill,
)


class Engines(Protocol):
    """The prefill and decode replicas, however they are reached.

    Call order: `prefill` (or `prefill_round`) → `decode` or `release`. Each may raise BadRequest,
    EngineFailure or Unavailable. Cancelling a call aborts it in the engine.
    """

    async def prefill(self, request: GenerateRequest) -> Handover:
        """Compute the prompt's KV on some prefill replica and pin it there."""
        ...

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        """Compute a round's prompts on one prefill replica; members come as they get ready."""
        ...

    async def prepare(self, forecast: Forecast) -> None:
        """Have what a session's next round will share computed where it will be wanted, if that is
        known, and nothing else is to be done there. May raise Unavailable."""
        ...

    async def cancel_member(self, request_id: RequestId) -> None:
        """Abort one member's part of a `prefill_round` under way; it then comes with an error."""
        ...

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        """Continue the prompt on some decode replica. The first delta is ADMITTED."""
        ...

    async def release(self, handover: Handover) -> None:
        """Give a handover up: nobody will read those blocks."""
        ...

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept of a conversation. Says whether anything was."""
        ...


class _NotAdmittedError(Unavailable):
    """The request's handover was getting old before any decode engine took it."""


class Dispatcher:
    """Runs requests on `engines`. One per process; holds no state between requests.

    `clock` is in seconds and only ever compared with itself.
    """

    def __init__(
        self,
        engines: Engines,
        settings: DispatchSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = engines
        self.settings = settings
        self._metrics = metrics
        self._clock = clock
        self._background = Tasks()

    async def generate(
        self, request: GenerateRequest, handover: Handover | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Serve `request`, from `handover` on if its prefill is done already (takes it over).

        Raises BadRequest, or Unavailable when every attempt failed before the first output, or
        EngineFailure when an engine failed after it.
        """
        settings = self.settings  # may change under way
        began = self._clock()
        gives_up_at = began + settings.patience_s
        failures = 0
        while True:
            delivered = False
            delta: Delta | None = None
            try:
                if handover is None and request.hand_over:
                    handover = await self.engines.prefill(request)
                age_s = request.age_s + self._clock() - began
                deltas = self._decode(msgspec.structs.replace(request, age_s=age_s), handover)
                handover = None  # _decode sees to it from here on
                async with contextlib.aclosing(deltas):
                    async for delta in deltas:
                        delivered = True
                        yield delta
                self._count(request, delta)
                return
            except _NotAdmittedError as error:
                if self._clock() > gives_up_at:
                    raise Unavailable(error.message) from error
            except Unavailable as error:
                failures += 1
                if delivered:
                    raise EngineFailure(
                        f"request {request.request_id} broke off in mid-answer: {error.message}"
                    ) from error
                if failures == settings.attempts:
                    raise Unavailable(
                        f"request {request.request_id} failed {failures} times: {error.message}"
                    ) from error
            finally:
                if handover is not None:
                    self.give_up(handover)
                    handover = None
            self._metrics.retries.inc()
            await asyncio.sleep(settings.retry_backoff_s * failures)

    def give_up(self, handover: Handover) -> None:
        """Release a handover in the background. If no replica can, its lease ends the pin."""

        async def release() -> None:
            # Later there is nothing left to release.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(handover.lease_s, 1.0)):
                    await self.engines.release(handover)

        self._background.run(release())

    def abandon(self, request_id: RequestId) -> None:
        """Cancel a member's prefill in the background: its client has gone."""
        self._background.run(self.engines.cancel_member(request_id))

    async def drain(self) -> None:
        """Wait for what goes on in the background."""
        await self._background.drain()

    async def _decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        """Decode, and see the handover off: to the decode engine, or released.

        Raises _NotAdmittedError when no engine has taken the request in half of the lease. It must
        not take it later: it would read blocks that the prefill engine has given to somebody else.
        """
        admitted = False
        try:
            async with contextlib.aclosing(self.engines.decode(request, handover)) as deltas:
                try:
                    async with asyncio.timeout(handover.lease_s / 2 if handover else None):
                        admitted = await anext(deltas, None) is not None
                except TimeoutError:
                    raise _NotAdmittedError(
                        f"request {request.request_id}: no decode replica has taken it"
                    ) from None
                async for delta in deltas:
                    yield delta
        finally:
            if handover is not None and not admitted:
                self.give_up(handover)

    def _count(self, request: GenerateRequest, last: Delta | None) -> None:
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        if last is not None and last.cached_tokens:
            self._metrics.tokens_saved.inc(last.cached_tokens)
