"""Engines that are killed while KV is kept, or read: the next turn is right, and nothing stays."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from td_serve.config import ConversationConfig
from td_serve.engine.host import EngineHost
from td_serve.errors import Unavailable
from td_serve.types import Handle, Handover, ReaderId, RequestId
from tests.engine.rig import (
    CONVERSATIONS,
    ENGINE,
    NIXL,
    Oracle,
    engine_processes,
    make_request,
    new_conversation,
    some_tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


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

    def start(self, name: str, conversations: ConversationConfig = CONVERSATIONS) -> EngineHost:
        before = engine_processes()
        role = "prefill" if name.startswith("p") else "decode"
        engine = msgspec.structs.replace(ENGINE, enable_prefix_caching=role == "decode")
        keeper = self if role == "prefill" else None
        self.hosts[name] = EngineHost.start(
            role, str(self._model), engine, NIXL, conversations, keeper
        )
        (self.processes[name],) = engine_processes() - before
        return self.hosts[name]

    def kill(self, name: str) -> None:
        """End an engine's process. Its host stays, as long as somebody may ask it."""
        self.processes.pop(name).kill()
        self._dead.append(self.hosts.pop(name))

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tiny)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(engines: Fleet) -> Fleet:
    """What earlier tests have left alive is used again."""
    engines.on_hold = lambda: None
    return engines


async def until_idle(host: EngineHost) -> None:
    """Nothing runs, is pinned or leased. Raises AssertionError."""
    deadline = time.monotonic() + 30
    for _ in itertools.count():
        counts = await host.lease_counts()
        if not counts.blocks and host.state().kv_usage == 0.0:
            return
        assert time.monotonic() < deadline, (counts, host.state())
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("when", ["between the turns", "in mid-read"])
async def test_a_decode_engine_that_dies_costs_only_the_time(
    fleet: Fleet, oracle: Oracle, when: str
) -> None:
    fleet.get("p1", "d1", "d2")
    prompt = some_tokens(600, 1)
    answer, handle, _ = await fleet.turn("p1", "d1", prompt)
    assert handle is not None
    if when == "in mid-read":
        # The hold is granted and its engine is gone: the read begins, and cannot end well.
        fleet.on_hold = lambda: fleet.kill("d1")
    else:
        fleet.kill("d1")
    prompt = prompt + answer + some_tokens(20, 2)
    answer, _, handover = await fleet.turn("p1", "d2", prompt, handle)
    assert answer == oracle.answer(prompt)
    assert handover.cached_tokens == 0
    assert handover.read is None or handover.read.failed
    await until_idle(fleet.hosts["p1"])


async def test_a_reader_that_is_killed_leaves_the_lease_as_it_was(
    fleet: Fleet, oracle: Oracle
) -> None:
    fleet.get("p1", "p2", "d1")
    prompt = some_tokens(600, 3)
    answer, handle, _ = await fleet.turn("p1", "d1", prompt)
    prompt = prompt + answer + some_tokens(20, 4)
    fleet.on_hold = lambda: fleet.kill("p1")
    with pytest.raises(Unavailable):
        await fleet.turn("p1", "d1", prompt, handle)
    fleet.on_hold = lambda: None
    answer, kept, handover = await fleet.turn("p2", "d1", prompt, handle)
    assert answer == oracle.answer(prompt)
    assert handover.read is not None
    assert not handover.read.failed
    assert kept is not None
    assert await fleet.hosts["d1"].forget(kept.conversation)
    await until_idle(fleet.hosts["d1"])


async def test_a_decode_engine_that_comes_back_on_the_same_port_is_another_one(
    fleet: Fleet, oracle: Oracle
) -> None:
    _, before = fleet.get("p2", "d1")
    prompt = some_tokens(300, 5)
    answer, handle, _ = await fleet.turn("p2", "d1", prompt)
    assert handle is not None
    port = before.state().nixl_port
    fleet.hosts.pop("d1").close()
    (again,) = fleet.get("d1")
    assert again.state().nixl_port == port
    prompt = prompt + answer + some_tokens(20, 6)
    # Its memory holds other things now, or nothing; its name and its birth are others too.
    for stale in (
        handle,
        msgspec.structs.replace(handle, replica=again.replica),
        msgspec.structs.replace(handle, replica=again.replica, epoch=again.epoch),
    ):
        answer, _, handover = await fleet.turn("p2", "d1", prompt, stale)
        assert answer == oracle.answer(prompt)
        assert handover.read is None


async def test_a_lease_that_is_over_is_not_read_and_its_blocks_are_free(
    fleet: Fleet, oracle: Oracle
) -> None:
    fleet.get("p2")
    brief = msgspec.structs.replace(CONVERSATIONS, decoder_kv_blocks_ttl=1.0)
    decode = fleet.start("d-brief", brief)
    prompt = some_tokens(300, 7)
    answer, handle, _ = await fleet.turn("p2", "d-brief", prompt)
    await asyncio.sleep(1.1)
    await until_idle(decode)
    assert (await decode.lease_counts()).ends == {"expired": 1}
    prompt = prompt + answer + some_tokens(20, 8)
    answer, _, handover = await fleet.turn("p2", "d-brief", prompt, handle)
    assert answer == oracle.answer(prompt)
    assert handover.read is None
