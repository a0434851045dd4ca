"""The host's side of leases, with a real keeper's answers and a clock of our own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from td_serve.engine.keeping import Keeping, LeaseSocket, Place
from td_serve.engine.leasing import LEASE, Granted, LeaseKeeper, LeaseOrder
from td_serve.transfer.ports import PortLease, lease_ports
from td_serve.types import ConversationKey, Epoch, GenerateRequest, LeaseId, ReplicaId
from tests.engine.rig import make_request
from tests.fakes import Clock

CHAT, OTHER = ConversationKey("chat"), ConversationKey("other")


class Rig:
    def __init__(self, keeping: Keeping, clock: Clock) -> None:
        self.keeping = keeping
        self.clock = clock

    def turn(self, conversation: ConversationKey = CHAT, age_s: float = 0.0) -> GenerateRequest:
        return msgspec.structs.replace(make_request([1, 2, 3], conversation), age_s=age_s)


async def nothing() -> None:
    """There is no engine to wake."""


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    # A socket's path must be short: pytest's own folders have long names.
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        port = lease_ports(23000, 30000, count=1, host="127.0.0.1", directory=Path(folder))
        async with contextlib.aclosing(keeping_at(port)) as made:
            async for rig in made:
                yield rig
        port.release()


async def keeping_at(port: PortLease) -> AsyncGenerator[Rig, None]:
    socket = LeaseSocket(port)
    keeper = LeaseKeeper(480.0, socket.address)
    clock = Clock()
    place = Place(
        replica=ReplicaId("d"), epoch=Epoch(1), host="127.0.0.1", port=port.first, tp_size=1
    )
    keeping = Keeping(socket, place, nothing, clock)
    yield Rig(keeping, clock)
    keeping.close()
    keeper.close()


@pytest.mark.parametrize(("age_s", "is_kept"), [(0.0, True), (4.9, True), (5.1, False)])
async def test_what_began_before_its_conversation_was_deleted_is_not_kept(
    rig: Rig, age_s: float, is_kept: bool
) -> None:
    assert not await rig.keeping.forget(CHAT)
    rig.clock.now += 5.0
    assert bool(rig.keeping.order(rig.turn(age_s=age_s))) == is_kept
    assert rig.keeping.order(rig.turn(OTHER, age_s=100.0)), "another conversation"


async def test_what_has_ordered_a_lease_when_its_conversation_is_deleted_gets_none(
    rig: Rig,
) -> None:
    order = rig.keeping.order(rig.turn())
    assert await rig.keeping.forget(CHAT), "there was a turn"
    rig.keeping.cancel(order)
    assert not await rig.keeping.forget(CHAT)


@pytest.mark.parametrize(("writes", "first"), [(CHAT, 3), (OTHER, 0), (None, 0)])
async def test_of_a_turn_that_is_read_for_what_it_says_its_prompt_is_not_kept(
    rig: Rig, writes: ConversationKey | None, first: int
) -> None:
    order = rig.keeping.order(msgspec.structs.replace(rig.turn(), writes=writes))
    assert msgspec.convert(order[LEASE], LeaseOrder).first == first


def granted(number: int) -> dict[str, Any]:
    """What the engine says of a turn that it keeps."""
    one = Granted(
        id=LeaseId(f"lease-{number}"),
        number=number,
        tokens=3,
        block_size=4,
        block_ids=[number],
        ttl_s=480.0,
    )
    return {LEASE: msgspec.to_builtins(one)}


@pytest.mark.parametrize("heard", [(0, 1), (1, 0)])
async def test_of_two_turns_that_ended_at_once_the_later_granted_has_the_handle(
    rig: Rig, heard: tuple[int, int]
) -> None:
    handles = [rig.keeping.handle(rig.turn(), [4], granted(number), None) for number in heard]
    last = [handle for handle in handles if handle is not None][-1]
    assert last.lease == "lease-1"
    if heard == (1, 0):
        assert handles[1] is None
