"""Real engines by name, in this process: started when wanted, killed when told."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from td_serve.config import ConversationConfig, NixlConfig
from td_serve.engine.host import EngineHost
from td_serve.types import Handle, Handover, ReaderId, RequestId
from tests.engine.rig import (
    CONVERSATIONS,
    ENGINE,
    NIXL,
    engine_processes,
    make_request,
    new_conversation,
)


class Fleet:
    """Engines by name, each with its process. Prefill engines ask whom a handle names."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.hosts: dict[str, EngineHost] = {}
        self._dead: list[EngineHost] = []
        self.processes: dict[str, psutil.Process] = {}
        self.on_hold: Callable[[], None] = lambda: None
        """Called when a hold has been granted, before the reader learns of it."""

    def get(self, *names: str) -> list[EngineHost]:
        """Live engines: `p…` prefills, `d…` decodes. Those that are not there are started."""
        return [self.hosts.get(name) or self.start(name) for name in names]

    def start(
        self,
        name: str,
        conversations: ConversationConfig = CONVERSATIONS,
        nixl: NixlConfig = NIXL,
        **changes: Any,
    ) -> EngineHost:
        """Start an engine, `changes` being of its configuration."""
        before = engine_processes()
        role = "prefill" if name.startswith("p") else "decode"
        engine = msgspec.structs.replace(
            ENGINE, **{"enable_prefix_caching": role == "decode", **changes}
        )
        keeper = self if role == "prefill" else None
        self.hosts[name] = EngineHost.start(
            role, str(self._model), engine, nixl, conversations, keeper
        )
        (self.processes[name],) = engine_processes() - before
        return self.hosts[name]

    def kill(self, name: str) -> None:
        """End an engine's process. Its host stays, as long as somebody may ask it."""
        self.processes.pop(name).kill()
        self._dead.append(self.hosts.pop(name))

    def stop(self, name: str) -> None:
        """End an engine as its owner would, if it is there."""
        self.processes.pop(name, None)
        if host := self.hosts.pop(name, None):
            host.close()

    def close(self) -> None:
        for host in [*self.hosts.values(), *self._dead]:
            host.close()

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        named = [host for host in self._keepers() if host.replica == handle.replica]
        # As a router would: if the one that is named has gone, another is asked.
        held = await (named or self._keepers())[0].hold(handle, reader, for_s)
        self.on_hold()
        return held

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        for host in self._keepers():
            if host.replica == handle.replica:
                await host.let_go(handle, reader)

    def _keepers(self) -> list[EngineHost]:
        hosts = [*self.hosts.values(), *self._dead]
        return [host for host in hosts if host.role == "decode"]

    async def decode(
        self, name: str, prompt: list[int], handover: Handover, request_id: str
    ) -> tuple[list[int], Handle | None]:
        """A turn's tokens, and the handle of what is kept of it."""
        request = msgspec.structs.replace(
            make_request(prompt, self._conversation), request_id=RequestId(request_id)
        )
        tokens: list[int] = []
        handle = None
        async for delta in self.hosts[name].decode(request, handover):
            tokens += (token for choice in delta.choices for token in choice.token_ids)
            handle = delta.handle or handle
        return tokens, handle

    async def turn(
        self, prefill: str, decode: str, prompt: list[int], handle: Handle | None = None
    ) -> tuple[list[int], Handle | None, Handover]:
        request = make_request(prompt, None)
        handover = await self.hosts[prefill].prefill(request, handle)
        tokens, kept = await self.decode(decode, prompt, handover, request.request_id)
        return tokens, kept, handover

    _conversation = new_conversation()


async def until_idle(host: EngineHost) -> None:
    """Nothing runs, is pinned or leased. Raises AssertionError."""
    deadline = time.monotonic() + 30
    for _ in itertools.count():
        counts = await host.lease_counts()
        if not counts.blocks and host.state().kv_usage == 0.0:
            return
        assert time.monotonic() < deadline, (counts, host.state())
        await asyncio.sleep(0.1)
