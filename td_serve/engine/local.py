"""Prefill and decode engines in one process, without Ray: for examples, tests and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence

from td_serve.config import EngineConfig, NixlConfig
from td_serve.engine.host import EngineHost
from td_serve.types import (
    Delta,
    GenerateRequest,
    Handover,
    MemberHandover,
    RequestId,
    RoundPrefill,
)


class LocalEngines:
    """`dispatch.Engines` over hosts of this process, taken in turn."""

    def __init__(self, prefill: Sequence[EngineHost], decode: Sequence[EngineHost]) -> None:
        self.hosts = [*prefill, *decode]
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)

    @classmethod
    def start(cls, model: str, engine: EngineConfig, nixl: NixlConfig) -> LocalEngines:
        """One prefill and one decode engine for `model`. Blocks while they load."""
        return cls(
            [EngineHost.start("prefill", model, engine, nixl)],
            [EngineHost.start("decode", model, engine, nixl)],
        )

    async def prefill(self, request: GenerateRequest) -> Handover:
        return await next(self._prefill).prefill(request)

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        return next(self._prefill).prefill_round(work)

    async def cancel_member(self, request_id: RequestId) -> None:
        for host in self.hosts:
            host.cancel_member(request_id)

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        return next(self._decode).decode(request, handover)

    async def release(self, handover: Handover) -> None:
        await next(self._decode).release(handover)

    def close(self) -> None:
        """Stop every engine."""
        for host in self.hosts:
            host.close()
