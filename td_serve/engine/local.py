"""Prefill and decode engines in one process, without Ray: for examples, tests and benchmarks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

import msgspec

from td_serve.config import ConversationConfig, EngineConfig, NixlConfig
from td_serve.directory import KVDirectory
from td_serve.engine.host import EngineHost
from td_serve.types import (
    ConversationKey,
    Delta,
    Forecast,
    GenerateRequest,
    Handover,
    MemberHandover,
    RequestId,
    RoundPrefill,
    SessionId,
)


class LocalEngines:
    """`dispatch.Engines` over hosts of this process, taken in turn."""

    def __init__(
        self,
        prefill: Sequence[EngineHost],
        decode: Sequence[EngineHost],
        directory: KVDirectory | None = None,
    ) -> None:
        self.hosts = [*prefill, *decode]
        self.decode_hosts = [*decode]
        self.directory = directory or KVDirectory()
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._had: dict[SessionId, EngineHost] = {}

    @classmethod
    def start(
        cls,
        model: str,
        engine: EngineConfig,
        nixl: NixlConfig,
        conversations: ConversationConfig | None = None,
        *,
        decode_engine: EngineConfig | None = None,
        prefill_engines: int = 1,
    ) -> LocalEngines:
        """Prefill engines, and one decode engine, for `model`. Blocks while they load."""
        conversations = conversations or ConversationConfig()
        hosts: list[EngineHost] = []
        try:
            decode = EngineHost.start("decode", model, decode_engine or engine, nixl, conversations)
            hosts.append(decode)
            while len(hosts) <= prefill_engines:
                hosts.append(
                    EngineHost.start("prefill", model, engine, nixl, conversations, keeper=decode)
                )
        except BaseException:
            for host in hosts:
                host.close()
            raise
        return cls(hosts[1:], [decode])

    async def prefill(self, request: GenerateRequest) -> Handover:
        known = request.conversation
        handle = None if known is None else self.directory.find(known)
        return await next(self._prefill).prefill(request, handle)

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        handles = {
            str(one.request_id): handle
            for one in work.requests
            if one.conversation is not None
            and (handle := self.directory.find(one.conversation)) is not None
        }
        work = msgspec.structs.replace(work, handles=handles)
        host = self._had[work.plan.sim] = next(self._prefill)
        return host.prefill_round(work)

    async def prepare(self, forecast: Forecast) -> None:
        if (host := self._had.get(forecast.sim)) is not None:
            await host.prepare(forecast)

    async def cancel_member(self, request_id: RequestId) -> None:
        for host in self.hosts:
            host.cancel_member(request_id)

    async def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        deltas = next(self._decode).decode(request, handover)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if delta.handle is not None:
                    self.directory.keep(delta.handle)
                    if request.writes is None:
                        delta = msgspec.structs.replace(delta, handle=None)
                yield delta

    async def release(self, handover: Handover) -> None:
        await next(self._decode).release(handover)

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept for a conversation. Says whether anything was."""
        return any([await host.forget(conversation) for host in self.hosts])

    def close(self) -> None:
        """Stop every engine."""
        for host in self.hosts:
            host.close()
