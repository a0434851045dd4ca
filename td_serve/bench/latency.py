"""Latencies into numbers: percentiles, fair turns, the table. Pure."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table

MOST_BLOCKS = 8


class Way(enum.Enum):
    """How a request reaches the engines."""

    DIRECT = "direct"
    """Both replicas called by their handles: no ingress, no coordinator."""
    HTTP = "http"
    """Through the proxy and the ingress."""
    ROUND = "round"
    """The same, as a round of one agent: through the coordinator too."""
    FLOOR = "floor"
    """Through the proxy and the ingress for an answer that needs no engine (`GET /v1/models`): what
    Ray Serve takes for any HTTP request. No completion."""


COMPLETIONS = (Way.DIRECT, Way.HTTP, Way.ROUND)
"""The ways that give the same tokens."""


class Block(msgspec.Struct, frozen=True):
    """Requests [start, stop), sent by one way after the other in `order`."""

    start: int
    stop: int
    order: tuple[Way, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies at one number of requests in flight, and what they are above `direct`."""

    concurrency: int
    direct_p50_ms: float
    direct_p99_ms: float
    http_p50_ms: float
    http_p99_ms: float
    round_p50_ms: float
    round_p99_ms: float
    floor_p50_ms: float
    floor_p99_ms: float
    http_overhead_p50_ms: float
    http_overhead_p99_ms: float
    round_overhead_p50_ms: float
    round_overhead_p99_ms: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`th percentile (0 to 100), interpolated between neighbours."""
    if not values:
        raise ValueError("no values, expected at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def take_turns(requests: int, concurrency: int) -> list[Block]:
    """Cut `requests` into blocks in which every way has its turn.

    A machine that drifts slows all ways alike, and none always comes first: the order turns round
    from block to block. A block keeps `concurrency` in flight over four waves if there are requests
    enough, so that its first burst and its end weigh little.
    """
    number = max(1, min(MOST_BLOCKS, requests // (4 * concurrency)))
    number -= number % 2 if number > 1 else 0
    edges = [requests * one // number for one in range(number + 1)]
    ways = tuple(Way)
    return [
        Block(start, stop, ways if one % 2 == 0 else ways[::-1])
        for one, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


def row(concurrency: int, seconds: Mapping[Way, Sequence[float]]) -> Row:
    """Latencies by way, in seconds, as a row in milliseconds."""
    found: dict[str, Any] = {
        f"{way.value}_p{percent}_ms": 1000 * percentile(seconds[way], percent)
        for way in Way
        for percent in (50, 99)
    }
    for way in (Way.HTTP, Way.ROUND):
        for percent in (50, 99):
            found[f"{way.value}_overhead_p{percent}_ms"] = (
                found[f"{way.value}_p{percent}_ms"] - found[f"direct_p{percent}_ms"]
            )
    return Row(concurrency=concurrency, **{name: round(ms, 3) for name, ms in found.items()})


def table(rows: Sequence[Row]) -> Table:
    """The rows, p50 / p99 in milliseconds."""
    made = Table(title="one-token completions, p50/p99 in ms")
    made.add_column("in flight", justify="right")
    for name in ("direct", "http", "round", "http − direct", "round − direct", "floor"):
        made.add_column(name, justify="right")
    for one in rows:
        values = msgspec.structs.asdict(one)
        made.add_row(
            str(one.concurrency),
            *(
                f"{values[f'{name}_p50_ms']:.1f}/{values[f'{name}_p99_ms']:.1f}"
                for name in ("direct", "http", "round", "http_overhead", "round_overhead", "floor")
            ),
        )
    return made
