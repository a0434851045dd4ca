"""Engines that are killed while KV is kept, or read: the next turn is right, and nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from td_serve.errors import Unavailable
from td_serve.leases import End
from tests.engine.fleet import Fleet, until_idle
from tests.engine.rig import CONVERSATIONS, NIXL, Oracle, some_tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


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
    fleet.get("p2")
    own = msgspec.structs.replace(NIXL, port_range=(21600, 21600))  # nobody else's
    fleet.stop("d1")
    fleet.start("d-own", nixl=own)
    prompt = some_tokens(300, 5)
    answer, handle, _ = await fleet.turn("p2", "d-own", prompt)
    assert handle is not None
    fleet.stop("d-own")
    again = fleet.start("d-own", nixl=own)
    assert again.state().nixl_port == 21600
    prompt = prompt + answer + some_tokens(20, 6)
    # Its memory holds other things now, or nothing; its name and its birth are others too.
    for stale in (
        handle,
        msgspec.structs.replace(handle, replica=again.replica),
        msgspec.structs.replace(handle, replica=again.replica, epoch=again.epoch),
    ):
        answer, _, handover = await fleet.turn("p2", "d-own", prompt, stale)
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
    assert (await decode.lease_counts()).ends == {End.EXPIRED: 1}
    prompt = prompt + answer + some_tokens(20, 8)
    answer, _, handover = await fleet.turn("p2", "d-brief", prompt, handle)
    assert answer == oracle.answer(prompt)
    assert handover.read is None
