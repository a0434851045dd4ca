"""What ingress and coordinator add to a request, against calling the engines by their handles.

A tiny random model: the engines' own time is small, so that the way is what is seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from td_serve.bench.latency import COMPLETIONS, Row, Way, row, take_turns
from td_serve.errors import TdServeError

if TYPE_CHECKING:
    from td_serve.bench.ways import Ways

PROMPT_TOKENS = 64
_GATE_PROMPTS = 8
_PLAIN_TOKENS_FROM = 1000  # below are control tokens and bytes, which nobody sends


class Prompts:
    """Random prompts, all different and the same for every run of one seed."""

    def __init__(self, model: Path, seed: int) -> None:
        config = json.loads((model / "config.json").read_text("utf-8"))
        self._vocabulary = range(_PLAIN_TOKENS_FROM, config["vocab_size"])
        self._random = random.Random(seed)

    def take(self, count: int) -> list[list[int]]:
        """`count` new prompts of PROMPT_TOKENS tokens."""
        return [self._random.choices(self._vocabulary, k=PROMPT_TOKENS) for _ in range(count)]


async def measure_overhead(
    ways: Ways,
    prompts: Prompts,
    requests: int,
    concurrency: Sequence[int],
    say: Callable[[str], None],
) -> list[Row]:
    """A row for each number of requests in flight, of `requests` measured requests by each way.

    Raises TdServeError when the ways disagree on a token, or a request fails.
    """
    await check_agreement(ways, prompts.take(_GATE_PROMPTS))
    rows = []
    for in_flight in concurrency:
        warm_up = prompts.take(max(8, 2 * in_flight))
        for way in Way:
            await run_block(ways, way, warm_up, in_flight)
        began = time.perf_counter()
        measured = prompts.take(requests)
        seconds: dict[Way, list[float]] = {way: [] for way in Way}
        for block in take_turns(requests, in_flight):
            for way in block.order:
                part = measured[block.start : block.stop]
                seconds[way] += await run_block(ways, way, part, in_flight)
        rows.append(row(in_flight, seconds))
        say(
            f"{in_flight} in flight: {requests} requests each way in "
            f"{time.perf_counter() - began:.0f} s"
        )
    return rows


async def check_agreement(ways: Ways, prompts: Sequence[list[int]]) -> None:
    """Raises TdServeError unless all ways give the same tokens for each prompt."""
    for prompt in prompts:
        answers = {
            way.value: await ways.ask(way, prompt, uuid.uuid4().hex, show=True)
            for way in COMPLETIONS
        }
        if len({tuple(tokens or ()) for tokens in answers.values()}) != 1:
            raise TdServeError(f"the ways disagree, nothing is measured: {answers}")


async def run_block(
    ways: Ways, way: Way, prompts: Sequence[list[int]], concurrency: int
) -> list[float]:
    """Complete `prompts` one way, `concurrency` in flight; returns each one's seconds."""
    salt = uuid.uuid4().hex
    left = iter(prompts)
    seconds: list[float] = []

    async def work() -> None:
        for prompt in left:
            began = time.perf_counter()
            await ways.ask(way, prompt, salt)
            seconds.append(time.perf_counter() - began)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as error:
        first = error.exceptions[0]
        raise first if isinstance(first, TdServeError) else error from None
    return seconds
