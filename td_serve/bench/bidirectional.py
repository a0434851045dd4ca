"""What reading a conversation's KV back saves: a second turn's time to first token, on and off.

One prefill and one decode engine in this process's care, no Ray: what is measured is the engines
and the transfer. Each sample is a conversation of two turns, played twice with the same tokens,
once with its KV kept and read back and once without; the two alternate, and must answer with the
same tokens. Prefill's own prefix cache is off, as in the measurements that this follows; `evicted`
and `p-cold` leave it on and show why it does not help there.
"""

from __future__ import annotations

import contextlib
import enum
import math
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

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


class Scenario(enum.Enum):
    """Why prefill does not have the conversation."""

    NO_CACHE = "no-cache"
    """It has no prefix cache."""
    EVICTED = "evicted"
    """Other traffic has filled its prefix cache since."""
    P_COLD = "p-cold"
    """The second turn goes to another prefill engine."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: `repeats` conversations for each length of a second turn's prompt."""

    model: str
    prompt_tokens: tuple[int, ...]
    repeats: int = 3
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


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians at one length, in milliseconds; decode's for each token after the first."""

    prompt_tokens: int
    ttft_on_ms: float
    ttft_off_ms: float
    transfer_ms: float
    recompute_on_ms: float
    recompute_off_ms: float
    decode_on_ms: float
    decode_off_ms: float
    bytes: int
    speedup: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`growth_ratio`: what TTFT grows by from the shortest prompt to the longest, on over off."""

    scenario: Scenario
    speedup_max: float
    growth_ratio: float | None
    retained_pool_share: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    rows: list[Row]
    summary: Summary


async def bench_bidirectional(options: Options, say: Callable[[str], None]) -> Result:
    """Measure on engines of our own. `say` tells the progress.

    Raises TdServeError when a prompt is too short for two turns, or the two ways disagree.
    """
    for tokens in options.prompt_tokens:
        if tokens < LEAST_PROMPT:
            raise TdServeError(
                f"--prompt-tokens: {tokens}, expected at least {LEAST_PROMPT}: "
                "a first turn, its reply and something new"
            )
    rows = []
    share = 0.0
    async with _Bench.started(options, say) as bench:
        for tokens in options.prompt_tokens:
            samples = [await bench.sample(tokens) for _ in range(options.repeats)]
            rows.append(row(tokens, [on for on, _ in samples], [off for _, off in samples]))
            share = max(share, await bench.retained_share())
            say(f"{tokens} tokens: {rows[-1].ttft_off_ms:.0f} ms, {rows[-1].ttft_on_ms:.0f} ms on")
    return Result(rows=rows, summary=summarise(rows, options.scenario, share))


def row(tokens: int, on: Sequence[Sample], off: Sequence[Sample]) -> Row:
    """Medians of both ways' samples."""

    def median_ms(values: list[float]) -> float:
        return round(1000 * statistics.median(values), 3)

    ttft_on, ttft_off = median_ms([s.ttft for s in on]), median_ms([s.ttft for s in off])
    return Row(
        prompt_tokens=tokens,
        ttft_on_ms=ttft_on,
        ttft_off_ms=ttft_off,
        transfer_ms=median_ms([s.transfer for s in on]),
        recompute_on_ms=median_ms([s.prefill - s.transfer for s in on]),
        recompute_off_ms=median_ms([s.prefill for s in off]),
        decode_on_ms=median_ms([s.decode for s in on]),
        decode_off_ms=median_ms([s.decode for s in off]),
        bytes=int(statistics.median([s.bytes for s in on])),
        speedup=round(ttft_off / ttft_on, 3),
    )


def summarise(rows: Sequence[Row], scenario: Scenario, retained_pool_share: float) -> Summary:
    """The few numbers to remember."""
    first, last = rows[0], rows[-1]
    grown_off = last.ttft_off_ms - first.ttft_off_ms
    return Summary(
        scenario=scenario,
        speedup_max=max(one.speedup for one in rows),
        growth_ratio=None
        if grown_off <= 0
        else round((last.ttft_on_ms - first.ttft_on_ms) / grown_off, 3),
        retained_pool_share=round(retained_pool_share, 4),
    )


class _Bench:
    """Engines, and conversations to play on them."""

    def __init__(self, options: Options, engines: LocalEngines, pool_tokens: int) -> None:
        from td_serve.dispatch import Dispatcher
        from td_serve.metrics import silent_metrics

        self._scenario = options.scenario
        self._engines = engines
        self._pool_tokens = pool_tokens
        self._dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())
        self._random = random.Random(options.seed)
        self._samples = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, options: Options, say: Callable[[str], None]) -> AsyncIterator[_Bench]:
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
            bench = cls(options, engines, pool_tokens)
            await bench.sample(warm_up)  # warms both ways up
            yield bench
            await bench._dispatcher.drain()
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

    async def retained_share(self) -> float:
        """The share of decode's pool that is kept for next turns."""
        shares = [await host.retained_share() for host in self._engines.decode_hosts]
        return max(shares)

    async def _play(self, first: list[int], new: list[int], *, kept: bool) -> Sample:
        """Both turns; the second one is the sample."""
        conversation = key("", uuid.uuid4().hex) if kept else None
        salt = uuid.uuid4().hex  # the other way's blocks are no help in any cache
        before = await self._turn(self._request(first, salt, conversation))
        if self._scenario is Scenario.EVICTED:
            # As much as the pool holds, and more: a prompt's beginning is evicted last.
            long = self._pool_tokens - _ROOM_TOKENS - 1
            for _ in range(1 + math.ceil(self._pool_tokens / long)):
                other = self._tokens(long)
                await self._turn(self._request(other, uuid.uuid4().hex, None, max_tokens=1))
        return await self._turn(self._request([*first, *before.reply, *new], salt, conversation))

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


def table(result: Result) -> Table:
    """The rows, in milliseconds."""
    made = Table(title=f"a second turn, {result.summary.scenario.value}: medians in ms")
    for name in (
        "prompt",
        "TTFT off",
        "TTFT on",
        "speed-up",
        "recompute off",
        "recompute on",
        "transfer",
        "MB read",
        "decode off",
        "decode on",
    ):
        made.add_column(name, justify="right")
    for one in result.rows:
        made.add_row(
            str(one.prompt_tokens),
            f"{one.ttft_off_ms:.0f}",
            f"{one.ttft_on_ms:.0f}",
            f"{one.speedup:.2f}",
            f"{one.recompute_off_ms:.0f}",
            f"{one.recompute_on_ms:.0f}",
            f"{one.transfer_ms:.0f}",
            f"{one.bytes / 1e6:.0f}",
            f"{one.decode_off_ms:.1f}",
            f"{one.decode_on_ms:.1f}",
        )
    return made


def plot(result: Result, model: str, path: Path) -> None:
    """Write one picture: TTFT over prompt length, and prefill's parts, off and on side by side.

    Raises TdServeError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    lines, bars = figure.subplots(1, 2)
    tokens = [one.prompt_tokens for one in result.rows]
    lines.plot(tokens, [r.ttft_off_ms for r in result.rows], marker="o", label="off: recomputed")
    lines.plot(tokens, [r.ttft_on_ms for r in result.rows], marker="o", label="on: read back")
    lines.set(xlabel="prompt of the second turn, tokens", ylabel="time to first token, ms")
    lines.set_ylim(bottom=0)
    lines.legend()
    places = range(len(tokens))
    on = [r.recompute_on_ms for r in result.rows]
    bars.bar(
        [x - 0.2 for x in places],
        [r.recompute_off_ms for r in result.rows],
        0.38,
        label="off: recompute",
    )
    bars.bar([x + 0.2 for x in places], on, 0.38, label="on: recompute")
    bars.bar(
        [x + 0.2 for x in places],
        [r.transfer_ms for r in result.rows],
        0.38,
        bottom=on,
        label="on: transfer",
    )
    bars.set(xlabel="prompt of the second turn, tokens", ylabel="prefill, ms")
    bars.set_xticks(list(places), [str(count) for count in tokens])
    bars.legend()
    figure.suptitle(f"{model}, one prefill and one decode engine, {result.summary.scenario.value}")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise TdServeError(f"{path}: cannot be written: {error}") from error
