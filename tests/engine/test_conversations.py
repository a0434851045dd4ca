"""Turns of a conversation on real engines: what is read back is right, or is computed instead.

One prefill engine without a prefix cache, so that whatever it did not compute it has read; one
decode engine that keeps turns. Every answer must be a plain engine's, token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from td_serve.breakeven import BreakEven
from td_serve.config import DispatchSettings
from td_serve.dispatch import Dispatcher
from td_serve.engine.codec import encode_sampling
from td_serve.engine.local import LocalEngines
from td_serve.handles import Keeper, common_tokens
from td_serve.leases import End
from td_serve.metrics import silent_metrics
from td_serve.types import (
    ConversationKey,
    Delta,
    Epoch,
    GenerateRequest,
    Handle,
    Handover,
    LeaseId,
    ReaderId,
    ReplicaId,
)
from tests.engine.rig import (
    BLOCK,
    CONVERSATIONS,
    ENGINE,
    LAYERS,
    NIXL,
    THRESHOLD,
    Oracle,
    make_request,
    new_conversation,
    some_tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


class Rig:
    """The engines, and a plain one to compare with."""

    def __init__(self, engines: LocalEngines, oracle: Oracle) -> None:
        self.engines = engines
        self.prefill, self.decode = engines.hosts
        self._oracle = oracle
        self._dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())

    async def turn(
        self, prompt: list[int], conversation: ConversationKey | None, max_tokens: int = 8
    ) -> tuple[list[int], Handover]:
        """Serve a turn; gives its tokens, and how its prefill went."""
        request = make_request(prompt, conversation, max_tokens)
        handover = await self.engines.prefill(request)
        return await self.finish(request, handover), handover

    async def finish(self, request: GenerateRequest, handover: Handover) -> list[int]:
        return await self._tokens(self._dispatcher.generate(request, handover))

    async def generate(self, request: GenerateRequest) -> list[int]:
        return await self._tokens(self._dispatcher.generate(request))

    @staticmethod
    async def _tokens(deltas: AsyncGenerator[Delta, None]) -> list[int]:
        tokens: list[int] = []
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                tokens += (token for choice in delta.choices for token in choice.token_ids)
        return tokens

    def wanted(self, prompt: list[int], max_tokens: int = 8) -> list[int]:
        return self._oracle.answer(prompt, max_tokens)

    def handle(self, conversation: ConversationKey) -> Handle:
        handle = self.engines.directory.find(conversation)
        assert handle is not None
        return handle

    async def settle(self, patience_s: float = NIXL.lease_s + 10.0) -> None:
        """Wait until nothing runs, is pinned or leased. Raises AssertionError.

        A prefill that was cancelled in the moment in which it finished is pinned for a lease.
        """
        await self._dispatcher.drain()
        deadline = time.monotonic() + patience_s
        while True:
            counts = await self.decode.lease_counts()
            states = [host.state() for host in self.engines.hosts]
            usage = [(one.running, one.waiting, one.kv_usage) for one in states]
            if not counts.blocks and usage == [(0, 0, 0.0)] * 2:
                return
            assert time.monotonic() < deadline, (counts, usage)
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny: Path) -> AsyncIterator[LocalEngines]:
    engines = LocalEngines.start(
        str(tiny),
        ENGINE,
        NIXL,
        CONVERSATIONS,
        decode_engine=msgspec.structs.replace(ENGINE, enable_prefix_caching=True),
    )
    yield engines
    engines.close()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(engines: LocalEngines, oracle: Oracle) -> AsyncIterator[Rig]:
    rig = Rig(engines, oracle)
    yield rig
    for tenant in list(engines.directory._tenants.values()):
        for conversation in list(tenant):
            await engines.forget(conversation)
    await rig.settle()


async def test_a_next_turn_computes_only_what_is_new(rig: Rig) -> None:
    """Prompt and reply of the turns before are read; only the last token, never fed, is new."""
    conversation, prompt = new_conversation(), some_tokens(150, 1)
    before = 0
    for number in range(4):
        answer, handover = await rig.turn(prompt, conversation)
        assert answer == rig.wanted(prompt)
        if before:
            assert handover.read is not None
            assert not handover.read.failed
            assert handover.read.tokens == handover.cached_tokens == before
            blocks = -(-before // BLOCK)
            assert handover.read.bytes == blocks * rig_block_bytes()
        else:
            assert (handover.read, handover.cached_tokens) == (None, 0)
        before = len(prompt) + len(answer) - 1
        assert rig.handle(conversation).tokens == before
        prompt = prompt + answer + some_tokens(10, number)
    assert (await rig.decode.lease_counts()).ends[End.SUPERSEDED] == 3


def rig_block_bytes() -> int:
    """K and V of every layer, 2 heads of 64, float32."""
    return LAYERS * 2 * 2 * 64 * 4 * BLOCK


@pytest.mark.parametrize(
    ("kept", "read"), [(70, 64), (95, 64), (96, 96), (128, 128), (140, 140), (150, 150)]
)
async def test_an_edited_history_is_read_up_to_the_edit(rig: Rig, kept: int, read: int) -> None:
    """A client that drops reasoning: the common prefix, in whole blocks, and in the last one."""
    conversation, prompt = new_conversation(), some_tokens(150, kept)
    await rig.turn(prompt, conversation)
    edited = prompt[:kept] + some_tokens(60, kept + 1000)
    answer, handover = await rig.turn(edited, conversation)
    assert answer == rig.wanted(edited)
    assert handover.cached_tokens == read
    assert handover.read is not None


async def test_the_same_prompt_again_is_read_but_for_its_last_token(rig: Rig) -> None:
    conversation, prompt = new_conversation(), some_tokens(128, 5)
    first, _ = await rig.turn(prompt, conversation)
    second, handover = await rig.turn(prompt, conversation)
    assert first == second == rig.wanted(prompt)
    assert handover.read is not None
    assert handover.read.tokens == 128


async def test_below_the_threshold_it_is_computed(rig: Rig) -> None:
    conversation, prompt = new_conversation(), some_tokens(THRESHOLD - 8, 6)
    answer, _ = await rig.turn(prompt, conversation, max_tokens=8)
    prompt = prompt + answer + some_tokens(20, 7)
    assert rig.handle(conversation).tokens == THRESHOLD - 1
    answer, handover = await rig.turn(prompt, conversation)
    assert answer == rig.wanted(prompt)
    assert (handover.read, handover.cached_tokens) == (None, 0)


async def test_without_a_conversation_nothing_is_kept(rig: Rig) -> None:
    prompt = some_tokens(150, 8)
    answer, _ = await rig.turn(prompt, None)
    assert answer == rig.wanted(prompt)
    await rig.settle()


def other(handle: Handle, **changes: Any) -> Handle:
    return msgspec.structs.replace(handle, **changes)


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda h: other(h, lease=LeaseId("0" * 32)), id="unknown lease"),
        pytest.param(lambda h: other(h, epoch=Epoch(h.epoch - 1)), id="another epoch"),
        pytest.param(lambda h: other(h, replica=ReplicaId("decode-x")), id="another engine"),
        pytest.param(lambda h: other(h, digests=b"x" * len(h.digests)), id="other tokens"),
        pytest.param(lambda h: other(h, digests=h.digests[:-1]), id="a cut digest"),
        pytest.param(lambda h: other(h, digests=b"", tail=[]), id="no tokens"),
        pytest.param(lambda h: other(h, block_size=16), id="another block size"),
        pytest.param(lambda h: other(h, tp_size=2), id="another tensor parallel size"),
        pytest.param(lambda h: other(h, block_ids=[h.block_ids[0][:2]]), id="too few blocks"),
        pytest.param(lambda h: other(h, block_ids=[[0] * 5]), id="other blocks"),
        pytest.param(lambda h: other(h, block_ids=[]), id="no blocks"),
        pytest.param(lambda h: other(h, tokens=h.tokens - 40), id="fewer tokens than digests"),
        pytest.param(lambda h: other(h, tokens=10_000), id="more tokens than blocks"),
    ],
)
async def test_a_handle_that_is_wrong_never_gives_wrong_tokens(
    rig: Rig, forge: Callable[[Handle], Handle]
) -> None:
    conversation, prompt = new_conversation(), some_tokens(150, 9)
    answer, _ = await rig.turn(prompt, conversation)
    forged = forge(rig.handle(conversation))
    prompt = prompt + answer + some_tokens(20, 10)
    request = make_request(prompt, None)
    handover = await rig.prefill.prefill(request, forged)
    assert await rig.finish(request, handover) == rig.wanted(prompt)


async def test_another_conversations_handle_is_read_only_where_the_tokens_are_the_same(
    rig: Rig,
) -> None:
    conversation, prompt = new_conversation(), some_tokens(150, 11)
    await rig.turn(prompt, conversation)
    strange = some_tokens(200, 12)
    assert common_tokens(rig.handle(conversation), strange, None) == 0
    request = make_request(strange, None)
    handover = await rig.prefill.prefill(request, rig.handle(conversation))
    assert handover.read is None
    assert await rig.finish(request, handover) == rig.wanted(strange)


async def test_a_deleted_conversation_is_computed_anew(rig: Rig) -> None:
    conversation, prompt = new_conversation(), some_tokens(150, 13)
    answer, _ = await rig.turn(prompt, conversation)
    assert await rig.engines.forget(conversation)
    assert not await rig.engines.forget(conversation)
    await rig.settle()
    prompt = prompt + answer + some_tokens(20, 14)
    answer, handover = await rig.turn(prompt, conversation)
    assert answer == rig.wanted(prompt)
    assert handover.read is None


async def test_a_client_that_leaves_before_it_has_learnt_of_the_lease_leaves_none(rig: Rig) -> None:
    """The engine has finished and granted it; the last delta has not been taken."""
    conversation, prompt = new_conversation(), some_tokens(150, 15)
    request = make_request(prompt, conversation)
    deltas = rig.decode.decode(request, await rig.engines.prefill(request))
    while not (await anext(deltas)).choices:
        pass  # what comes after the first token may come in one, the last one included
    async with asyncio.timeout(20):
        while not (await rig.decode.lease_counts()).live:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
    await deltas.aclose()
    await rig.settle()


async def test_leases_go_before_a_live_request_is_preempted_or_waits(rig: Rig) -> None:
    """The pool holds 2,304 tokens; ten conversations of 470 want more than twice as much."""
    conversations = {new_conversation(): some_tokens(470, 20 + n) for n in range(10)}
    for conversation, prompt in conversations.items():
        answer, _ = await rig.turn(prompt, conversation)
        assert answer == rig.wanted(prompt)
    ends = (await rig.decode.lease_counts()).ends
    assert ends[End.RECLAIMED] >= 6
    for conversation, prompt in conversations.items():
        longer = prompt + some_tokens(10, 30)
        answer, _ = await rig.turn(longer, conversation)
        assert answer == rig.wanted(longer)


async def test_thirty_conversations_of_many_turns_in_a_pool_too_small_for_them(rig: Rig) -> None:
    """At once, with cancels among them: nobody gets another's tokens, and nothing is left."""
    turns, number = 10, 30

    async def converse(seed: int) -> None:
        conversation, prompt = new_conversation(), some_tokens(70, 100 + seed)
        for turn in range(turns):
            if (seed + turn) % 7 == 0:
                await gone(rig, prompt, conversation)
            answer, _ = await rig.turn(prompt, conversation, max_tokens=4)
            answers.append((prompt, answer))
            prompt = prompt + answer + some_tokens(9, turn)

    answers: list[tuple[list[int], list[int]]] = []
    async with asyncio.TaskGroup() as group:
        for seed in range(number):
            group.create_task(converse(seed))
    assert len(answers) == turns * number
    for prompt, answer in answers:
        assert answer == rig.wanted(prompt, max_tokens=4)


async def gone(rig: Rig, prompt: list[int], conversation: ConversationKey) -> None:
    """A client that leaves while its prefill reads."""
    request = make_request(prompt, conversation)
    task = asyncio.create_task(rig.engines.prefill(request))
    await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await rig.engines.release(await task)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.05])
async def test_a_client_that_leaves_in_mid_read_leaves_nothing_behind(
    rig: Rig, after_s: float
) -> None:
    conversation, prompt = new_conversation(), some_tokens(400, 50)
    answer, _ = await rig.turn(prompt, conversation)
    prompt = prompt + answer + some_tokens(20, 51)
    task = asyncio.create_task(rig.engines.prefill(make_request(prompt, conversation)))
    await asyncio.sleep(after_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await rig.engines.release(await task)
    answer, handover = await rig.turn(prompt, conversation)
    assert answer == rig.wanted(prompt)
    assert handover.read is not None, "a read that failed has used nothing up"


class Impatient:
    """A keeper that grants every hold, at the engine's or not, and says so late."""

    def __init__(self, keeper: Keeper, after_s: float) -> None:
        self._keeper = keeper
        self._after_s = after_s

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        held = await self._keeper.hold(handle, reader, for_s)
        await asyncio.sleep(self._after_s)
        return held

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        await self._keeper.let_go(handle, reader)


async def test_a_hold_that_is_over_before_the_read_begins_is_not_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, prompt = new_conversation(), some_tokens(150, 52)
    answer, _ = await rig.turn(prompt, conversation)
    monkeypatch.setattr(rig.prefill.reading, "keeper", Impatient(rig.decode, 0.3))
    hurried = msgspec.structs.replace(rig.prefill.reading.settings, read_patience_s=0.2)
    monkeypatch.setattr(rig.prefill.reading, "settings", hurried)
    prompt = prompt + answer + some_tokens(20, 53)
    answer, handover = await rig.turn(prompt, conversation)
    assert answer == rig.wanted(prompt)
    assert (handover.read, handover.cached_tokens) == (None, 0)


async def test_a_reader_lets_go_when_it_has_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only when its time is over, which is longer here than this waits."""
    patient = msgspec.structs.replace(rig.prefill.reading.settings, read_patience_s=600.0)
    monkeypatch.setattr(rig.prefill.reading, "settings", patient)
    conversation, prompt = new_conversation(), some_tokens(150, 56)
    answer, _ = await rig.turn(prompt, conversation)
    _, handover = await rig.turn(prompt + answer + some_tokens(20, 57), conversation)
    assert handover.read is not None
    async with asyncio.timeout(20):
        while (await rig.decode.lease_counts()).held:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)


async def test_the_threshold_finds_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few turns it is measured what both ways take, and no guess counts any more: whatever
    it would have been, the threshold is what it is."""
    auto = msgspec.structs.replace(rig.prefill.reading.settings, kv_recompute_threshold="auto")
    monkeypatch.setattr(rig.prefill.reading, "settings", auto)
    measured = BreakEven(64)
    monkeypatch.setattr(rig.prefill.reading, "_break_even", measured)
    assert rig.prefill.reading.least_tokens == 64
    conversation, prompt = new_conversation(), some_tokens(200, 60)
    for number in range(4):
        answer, _ = await rig.turn(prompt, conversation)
        assert answer == rig.wanted(prompt)
        prompt = prompt + answer + some_tokens(40, 61 + number)
    found = rig.prefill.reading.least_tokens
    monkeypatch.setattr(measured, "_before", 65)
    assert rig.prefill.reading.least_tokens == found


async def test_a_request_that_grows_takes_leases_and_is_not_preempted(rig: Rig) -> None:
    """The pool is full of leases when it begins, and it needs 19 blocks more than its prompt."""
    for seed in range(5):
        await rig.turn(some_tokens(440, 70 + seed), new_conversation())
    before = await rig.decode.lease_counts()
    assert before.blocks >= 65, "nearly all of 72"
    preemptions = rig.decode.preemptions
    prompt = some_tokens(100, 80)
    answer, _ = await rig.turn(prompt, None, max_tokens=600)
    assert answer == rig.wanted(prompt, max_tokens=600)
    assert rig.decode.preemptions == preemptions
    after = await rig.decode.lease_counts()
    assert after.ends[End.RECLAIMED] > before.ends.get(End.RECLAIMED, 0)


async def test_a_stop_string_that_is_found_late_leaves_no_lease(rig: Rig, tiny: Path) -> None:
    """It is found in this process. Here that hears nothing more until the engine has come to an end
    of its own, and has kept the turn."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompt, stop = next(
        (prompt, texts[3])
        for prompt in (some_tokens(100, 7000 + seed) for seed in range(50))
        if (texts := [tokenizer.decode([token]) for token in rig.wanted(prompt)])[3].strip()
        and texts[3] not in "".join(texts[:3])
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=5,
        ignore_eos=True,
        stop=[stop],
        output_kind=RequestOutputKind.DELTA,
    )
    request = msgspec.structs.replace(
        make_request(prompt, new_conversation()), sampling=encode_sampling(sampling)
    )
    handover = await rig.engines.prefill(request)
    core = rig.decode._llm.engine_core
    hear, granted = core.get_output_async, asyncio.Event()

    async def hear_late() -> Any:
        outputs = await hear()
        await granted.wait()
        return outputs

    core.get_output_async = hear_late
    try:
        turn = asyncio.create_task(rig.finish(request, handover))
        async with asyncio.timeout(30):
            while not (await rig.decode.lease_counts()).live:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.01)
        granted.set()
        assert len(await turn) == 4, "cut by the stop string, and not by the cap"
    finally:
        granted.set()
        core.get_output_async = hear
    assert rig.engines.directory.find(request.conversation) is None
    await rig.settle()


async def test_what_is_deleted_while_it_is_decoded_is_not_kept(rig: Rig) -> None:
    conversation = new_conversation()
    request = make_request(some_tokens(100, 8000), conversation, 40)
    deltas = rig.engines.decode(request, await rig.engines.prefill(request))
    async with contextlib.aclosing(deltas):
        heard = 0
        async for delta in deltas:
            heard += sum(len(choice.token_ids) for choice in delta.choices)
            if heard == 1:
                assert await rig.engines.forget(conversation), "a turn is under way"
    assert heard == 40
    assert rig.engines.directory.find(conversation) is None
    assert not await rig.engines.forget(conversation)
    await rig.settle()


async def test_what_is_deleted_while_it_is_prefilled_is_not_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decode engine has not heard of the turn yet; the turn after it is kept."""
    conversation, prompt = new_conversation(), some_tokens(100, 8001)
    prefill = rig.engines.prefill

    async def prefill_and_delete(request: GenerateRequest) -> Handover:
        handover = await prefill(request)
        assert not await rig.engines.forget(conversation)
        return handover

    with monkeypatch.context() as patch:
        patch.setattr(rig.engines, "prefill", prefill_and_delete)
        assert await rig.generate(make_request(prompt, conversation)) == rig.wanted(prompt)
    assert rig.engines.directory.find(conversation) is None
    await rig.settle()
    await rig.generate(make_request(prompt, conversation))
    assert rig.handle(conversation).tokens == 107
    assert await rig.engines.forget(conversation)


async def test_of_two_turns_that_end_at_once_the_one_that_is_kept_is_found(rig: Rig) -> None:
    for seed in range(8100, 8108):
        conversation = new_conversation()
        prompts = [some_tokens(100, seed), some_tokens(100, seed + 50)]
        requests = [make_request(prompt, conversation) for prompt in prompts]
        handovers = [await rig.engines.prefill(request) for request in requests]
        answers = await asyncio.gather(*map(rig.finish, requests, handovers))
        assert answers == [rig.wanted(prompt) for prompt in prompts]
        live = (await rig.decode.lease_counts()).live
        assert [rig.handle(conversation).lease] == list(live)
        assert await rig.engines.forget(conversation)
        await rig.settle()
