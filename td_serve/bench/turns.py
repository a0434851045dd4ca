"""Conversations of two turns on engines of our own, with their KV kept and read back or without.

One prefill and one decode engine in this process's care, no Ray: what is measured is the engines
and the transfer. Prefill's own prefix cache is off, as in the measurements that this follows;
`evicted` and `p-cold` leave it on and show why it does not help there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec

from td_serve.config import ConversationConfig, DispatchSettings, EngineConfig, NixlConfig
from td_serve.conversations import key
from td_serve.errors import TdServeError
from td_serve.types import ConversationKey, GenerateRequest, Handover, RequestId

if TYPE_CHECKING:
    from td_serve.engine.local import LocalEngines

BLOCK_SIZE = 32
REPLY_TOKENS = 16
NEW_TOKENS = 32
"""Of a second turn's prompt, what neither the first turn's prompt nor its reply had."""
LEAST_PROMPT = REPLY_TOKENS + NEW_TOKENS + 1

_FIRST_ORDINARY_TOKEN = 1000
_ROOM_TOKENS = 512
_LOAD_PROMPT = 128
_LOAD_REPLY = 64


class Scenario(enum.Enum):
    """Why prefill does not have the conversation."""

    NO_CACHE = "no-cache"
    """It has no prefix cache."""
    EVICTED = "evicted"
    """Other traffic has filled its prefix cache since."""
    P_COLD = "p-cold"
    """The second turn goes to another prefill engine."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: `repeats` conversations for each length of a second turn's prompt, and
    decoding with `in_flight` at once."""

    model: str
    prompt_tokens: tuple[int, ...]
    repeats: int = 3
    in_flight: int = 8
    scenario: Scenario = Scenario.NO_CACHE
    threshold: int = 64
    dtype: str = "float32"
    seed: int = 0


class Sample(msgspec.Struct, frozen=True):
    """One second turn. Times in seconds; prefill's includes the transfer, decode's is per token."""

    ttft: float
    prefill: float
    transfer: float
    decode: float
    bytes: int
    reply: tuple[int, ...]


class Turns:
    """Engines, and conversations to play on them."""

    def __init__(self, options: Options, engines: LocalEngines, pool_tokens: int) -> None:
        from td_serve.dispatch import Dispatcher
        from td_serve.metrics import silent_metrics

        self._scenario = options.scenario
        self._in_flight = options.in_flight
        self._engines = engines
        self._pool_tokens = pool_tokens
        self._dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())
        self._random = random.Random(options.seed)
        self._samples = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, options: Options, say: Callable[[str], None]) -> AsyncIterator[Turns]:
        from td_serve.engine.local import LocalEngines
        from td_serve.models.resolve import resolve

        warm_up = max(LEAST_PROMPT, 2 * options.threshold)
        longest = max(*options.prompt_tokens, warm_up) + REPLY_TOKENS
        # Prefill's pool holds one such prompt and little else, so that other traffic evicts it.
        pool_tokens = longest + _ROOM_TOKENS
        say("starting the engines")
        engines = LocalEngines.start(
            resolve(options.model),
            _engine(
                options.dtype,
                longest,
                blocks=math.ceil(pool_tokens / BLOCK_SIZE),
                prefix_caching=options.scenario is not Scenario.NO_CACHE,
            ),
            NixlConfig(host="127.0.0.1", env={"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"}),
            ConversationConfig(kv_recompute_threshold=options.threshold),
            decode_engine=_engine(
                options.dtype,
                longest,
                blocks=math.ceil(4 * pool_tokens / BLOCK_SIZE),
                prefix_caching=True,
            ),
            prefill_engines=2 if options.scenario is Scenario.P_COLD else 1,
        )
        try:
            turns = cls(options, engines, pool_tokens)
            await turns.sample(warm_up)  # warms both ways up
            yield turns
            await turns._dispatcher.drain()
        finally:
            engines.close()

    async def sample(self, tokens: int) -> tuple[Sample, Sample]:
        """A conversation whose second prompt has `tokens` tokens, on and off.

        Which comes first changes from sample to sample. Raises TdServeError when they disagree.
        """
        first = self._tokens(tokens - REPLY_TOKENS - NEW_TOKENS)
        new = self._tokens(NEW_TOKENS)
        order = [True, False] if self._samples % 2 else [False, True]
        self._samples += 1
        found = {kept: await self._play(first, new, kept=kept) for kept in order}
        if found[True].reply != found[False].reply:
            raise TdServeError(
                f"at {tokens} tokens the answers differ: {found[True].reply} with the KV read "
                f"back, {found[False].reply} without"
            )
        return found[True], found[False]

    async def decode_at_load(self, *, kept: bool) -> float:
        """Seconds a token, of `in_flight` first turns at once: the median of them."""
        turns = [
            self._turn(
                self._request(
                    self._tokens(_LOAD_PROMPT),
                    uuid.uuid4().hex,
                    self._conversation(kept=kept),
                    max_tokens=_LOAD_REPLY,
                )
            )
            for _ in range(self._in_flight)
        ]
        return statistics.median([one.decode for one in await asyncio.gather(*turns)])

    async def retained_share(self) -> float:
        """The share of decode's pool that is kept for next turns."""
        shares = [await host.retained_share() for host in self._engines.decode_hosts]
        return max(shares)

    async def _play(self, first: list[int], new: list[int], *, kept: bool) -> Sample:
        """Both turns; the second one is the sample."""
        conversation = self._conversation(kept=kept)
        salt = uuid.uuid4().hex  # the other way's blocks are no help in any cache
        before = await self._turn(self._request(first, salt, conversation))
        if self._scenario is Scenario.EVICTED:
            # As much as the pool holds, and more: a prompt's beginning is evicted last.
            long = self._pool_tokens - _ROOM_TOKENS - 1
            for _ in range(1 + math.ceil(self._pool_tokens / long)):
                other = self._tokens(long)
                await self._turn(self._request(other, uuid.uuid4().hex, None, max_tokens=1))
        return await self._turn(self._request([*first, *before.reply, *new], salt, conversation))

    @staticmethod
    def _conversation(*, kept: bool) -> ConversationKey | None:
        """A new one, if its turns shall be kept."""
        return key("", uuid.uuid4().hex) if kept else None

    async def _turn(self, request: GenerateRequest) -> Sample:
        began = time.perf_counter()
        handover: Handover = await self._engines.prefill(request)
        prefilled = time.perf_counter()
        first_token: float | None = None
        reply: list[int] = []
        async for delta in self._dispatcher.generate(request, handover):
            if delta.choices and first_token is None:
                first_token = time.perf_counter()
            reply += (token for choice in delta.choices for token in choice.token_ids)
        ended = time.perf_counter()
        assert first_token is not None
        read = handover.read
        return Sample(
            ttft=first_token - began,
            prefill=prefilled - began,
            transfer=0.0 if read is None else read.seconds,
            decode=(ended - first_token) / max(1, len(reply) - 1),
            bytes=0 if read is None else read.bytes,
            reply=tuple(reply),
        )

    def _request(
        self,
        prompt: list[int],
        salt: str,
        conversation: ConversationKey | None,
        max_tokens: int = REPLY_TOKENS,
    ) -> GenerateRequest:
        from td_serve.engine.codec import greedy_sampling

        return GenerateRequest(
            request_id=RequestId(f"bench-{uuid.uuid4().hex}"),
            prompt_token_ids=prompt,
            sampling=greedy_sampling(max_tokens),
            cache_salt=salt,
            conversation=conversation,
        )

    def _tokens(self, count: int) -> list[int]:
        vocabulary = range(_FIRST_ORDINARY_TOKEN, self._engines.hosts[0].vocabulary)
        return self._random.choices(vocabulary, k=count)


def _engine(dtype: str, longest: int, *, blocks: int, prefix_caching: bool) -> EngineConfig:
    return EngineConfig(
        dtype=dtype,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        enable_prefix_caching=prefix_caching,
        # Or vLLM would measure how much memory there is, which is no matter here.
        kv_cache_gib=0.5,
        extra={"num_gpu_blocks_override": blocks},
        env={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
