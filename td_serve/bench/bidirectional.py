"""What reading a conversation's KV back saves: a second turn's time to first token, on and off.

Each sample is a conversation of two turns, played twice with the same tokens, once with its KV kept
and read back and once without; the two alternate, and must answer with the same tokens. What
keeping costs is measured last: decoding with many at once, kept and not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from td_serve.bench.turns import LEAST_PROMPT, Options, Sample, Scenario, Turns
from td_serve.errors import TdServeError


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


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding with `in_flight` requests at once, in milliseconds a token: medians."""

    in_flight: int
    decode_on_ms: float
    decode_off_ms: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`growth_ratio`: what TTFT grows by from the shortest prompt to the longest, on over off.

    `retained_pool_share`: how much of decode's pool was kept for next turns at most, 0 to 1.
    """

    scenario: Scenario
    speedup_max: float
    growth_ratio: float | None
    retained_pool_share: float
    load: Load


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
    async with Turns.started(options, say) as turns:
        for tokens in options.prompt_tokens:
            samples = [await turns.sample(tokens) for _ in range(options.repeats)]
            rows.append(row(tokens, [on for on, _ in samples], [off for _, off in samples]))
            share = max(share, await turns.retained_share())
            say(f"{tokens} tokens: {rows[-1].ttft_off_ms:.0f} ms, {rows[-1].ttft_on_ms:.0f} ms on")
        load = await _load(turns, options)
        share = max(share, await turns.retained_share())
    return Result(rows=rows, summary=summarise(rows, options.scenario, share, load))


async def _load(turns: Turns, options: Options) -> Load:
    """Both ways alternate; with each repetition more is kept."""
    on, off = [], []
    for _ in range(options.repeats):
        off.append(await turns.decode_at_load(kept=False))
        on.append(await turns.decode_at_load(kept=True))
    return Load(
        in_flight=options.in_flight, decode_on_ms=_median_ms(on), decode_off_ms=_median_ms(off)
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


def row(tokens: int, on: Sequence[Sample], off: Sequence[Sample]) -> Row:
    """Medians of both ways' samples."""
    ttft_on, ttft_off = _median_ms([s.ttft for s in on]), _median_ms([s.ttft for s in off])
    return Row(
        prompt_tokens=tokens,
        ttft_on_ms=ttft_on,
        ttft_off_ms=ttft_off,
        transfer_ms=_median_ms([s.transfer for s in on]),
        recompute_on_ms=_median_ms([s.prefill - s.transfer for s in on]),
        recompute_off_ms=_median_ms([s.prefill for s in off]),
        decode_on_ms=_median_ms([s.decode for s in on]),
        decode_off_ms=_median_ms([s.decode for s in off]),
        bytes=int(statistics.median([s.bytes for s in on])),
        speedup=round(ttft_off / ttft_on, 3),
    )


def summarise(
    rows: Sequence[Row], scenario: Scenario, retained_pool_share: float, load: Load
) -> Summary:
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
        load=load,
    )
