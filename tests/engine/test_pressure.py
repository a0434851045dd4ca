"""Engines that are short of room or of time: turns are still right, and nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from td_serve.errors import Unavailable
from tests.engine.fleet import Fleet, until_idle
from tests.engine.rig import CONVERSATIONS, NIXL, Oracle, make_request, some_tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tiny)
    yield fleet
    fleet.close()


async def test_a_turn_that_is_preempted_after_its_read_is_computed(
    fleet: Fleet, oracle: Oracle
) -> None:
    """The pool has room for what is read and not for what is new, until somebody else is done."""
    fleet.get("d1")
    prefill = fleet.start(
        "p-small",
        max_model_len=1280,
        max_num_batched_tokens=128,
        extra={"num_gpu_blocks_override": 41, "scheduler_reserve_full_isl": False},
    )
    prompt = some_tokens(300, 1)
    answer, handle, _ = await fleet.turn("p-small", "d1", prompt)
    await until_idle_but_for_leases(fleet, "p-small")
    in_the_way = make_request(some_tokens(800, 2), None)
    pinned = await prefill.prefill(in_the_way)
    prompt = prompt + answer + some_tokens(300, 3)
    request = make_request(prompt, None)
    turn = asyncio.create_task(prefill.prefill(request, handle))
    done, _ = await asyncio.wait({turn}, timeout=3.0)
    assert not done, "there was room"
    await fleet.hosts["d1"].release(pinned)
    handover = await asyncio.wait_for(turn, 60)
    assert prefill.preemptions
    tokens, _ = await fleet.decode("d1", prompt, handover, request.request_id)
    assert tokens == oracle.answer(prompt)
    assert handover.read is not None
    assert handover.read.failed, "what it had read was lost"
    assert handover.cached_tokens == 0
    await until_idle(prefill)


async def test_what_waits_for_a_busy_decode_engine_is_kept_for_it(
    fleet: Fleet, oracle: Oracle
) -> None:
    """128 that are prefilled wait for twice as long as a lease lasts: four others are decoded."""
    brief = msgspec.structs.replace(NIXL, lease_s=6)
    prefill = fleet.start("p-brief", nixl=brief, extra={"num_gpu_blocks_override": 520})
    decode = fleet.start(
        "d-busy", nixl=brief, max_num_seqs=4, extra={"num_gpu_blocks_override": 300}
    )

    async def one(prompt: list[int], max_tokens: int) -> list[int]:
        request = make_request(prompt, None, max_tokens=max_tokens)
        handover = await prefill.prefill(request)
        tokens: list[int] = []
        async for delta in decode.decode(request, handover):
            tokens += (token for choice in delta.choices for token in choice.token_ids)
        return tokens

    async with asyncio.TaskGroup() as group:
        long = [group.create_task(one(some_tokens(70, seed), 1900)) for seed in range(4)]
        while decode.state().running < 4:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
        prompts = [some_tokens(70, 1000 + seed) for seed in range(128)]
        brief_ones = [group.create_task(one(prompt, 8)) for prompt in prompts]
        await asyncio.sleep(2 * brief.lease_s)
        for seed in range(20):
            # Whatever had been given up would be somebody else's by now.
            other = make_request(some_tokens(600, 2000 + seed), None)
            await decode.release(await prefill.prefill(other))
        assert not any(task.done() for task in [*long, *brief_ones]), "somebody had not to wait"
        for task in long:
            task.cancel()
    answers = [await task for task in brief_ones]
    assert answers == [oracle.answer(prompt) for prompt in prompts]
    await until_idle(prefill)
    await until_idle(decode)


async def test_a_decode_engine_that_stood_still_does_not_believe_what_it_reads(
    fleet: Fleet,
) -> None:
    """It is stopped until its handover's lease is over and the blocks are somebody else's."""
    brief = msgspec.structs.replace(NIXL, lease_s=6)
    prefill = fleet.start("p-tight", nixl=brief)
    decode = fleet.start("d-stopped", nixl=brief)
    await fleet.turn("p-tight", "d-stopped", some_tokens(70, 5))  # they know each other
    prompt = some_tokens(300, 6)
    request = make_request(prompt, None)
    handover = await prefill.prefill(request)
    fleet.processes["d-stopped"].suspend()
    answering = asyncio.create_task(fleet.decode("d-stopped", prompt, handover, request.request_id))
    await until_idle(prefill)
    pinned = [
        await prefill.prefill(make_request(some_tokens(700, seed), None)) for seed in (7, 8, 9)
    ]
    fleet.processes["d-stopped"].resume()
    with pytest.raises(Unavailable, match="could not load its KV"):
        await answering  # and its dispatcher has it prefilled anew
    for other in pinned:
        await decode.release(other)
    await until_idle(prefill)


async def test_a_read_that_was_not_over_in_time_is_thrown_away(
    fleet: Fleet, oracle: Oracle
) -> None:
    """Over TCP a read wants the other side's help: it stands still from the hold until after it."""
    tcp = msgspec.structs.replace(NIXL, env={**NIXL.env, "UCX_TLS": "tcp,self"})
    impatient = msgspec.structs.replace(CONVERSATIONS, read_patience_s=1.0)
    prefill = fleet.start("p-tcp", impatient, nixl=tcp)
    fleet.start("d-tcp", nixl=tcp)
    prompt = some_tokens(600, 10)
    answer, handle, _ = await fleet.turn("p-tcp", "d-tcp", prompt)
    prompt = prompt + answer + some_tokens(20, 11)
    answer, handle, handover = await fleet.turn("p-tcp", "d-tcp", prompt, handle)
    assert answer == oracle.answer(prompt)
    assert handover.read is not None
    assert not handover.read.failed, "they know each other now"
    fleet.on_hold = fleet.processes["d-tcp"].suspend
    prompt = prompt + answer + some_tokens(20, 12)
    request = make_request(prompt, None)
    turn = asyncio.create_task(prefill.prefill(request, handle))
    await asyncio.wait({turn}, timeout=2 * impatient.read_patience_s)
    fleet.on_hold = lambda: None
    fleet.processes["d-tcp"].resume()
    handover = await asyncio.wait_for(turn, 60)
    assert handover.read is not None
    assert handover.read.failed, "no hold ended in mid-read"
    assert handover.cached_tokens == 0, "nothing of it was used"
    tokens, _ = await fleet.decode("d-tcp", prompt, handover, request.request_id)
    assert tokens == oracle.answer(prompt)
    await until_idle(prefill)


async def test_an_engine_that_must_go_lets_those_finish_who_read_from_it(
    fleet: Fleet, oracle: Oracle
) -> None:
    prefill, decode = fleet.get("p1", "d1")
    prompt = some_tokens(300, 4)
    request = make_request(prompt, None)
    handover = await prefill.prefill(request)
    draining = asyncio.create_task(prefill.drain())
    done, _ = await asyncio.wait({draining}, timeout=1.0)
    assert not done, "its blocks have not been read"
    tokens, handle = await fleet.decode("d1", prompt, handover, request.request_id)
    assert tokens == oracle.answer(prompt)
    await asyncio.wait_for(draining, 20)
    assert handle is not None
    reader = handle.lease
    assert await decode.hold(handle, reader, 60.0)
    draining = asyncio.create_task(decode.drain())
    done, _ = await asyncio.wait({draining}, timeout=1.0)
    assert not done, "somebody reads"
    await decode.let_go(handle, reader)
    await asyncio.wait_for(draining, 20)


async def until_idle_but_for_leases(fleet: Fleet, name: str) -> None:
    async with asyncio.timeout(30):
        while fleet.hosts[name].state().kv_usage:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
