"""How quickly a round's members' KV comes back into an engine's pages, on a recorded trace.

One engine in this process plays a round by a preset's rule; what the pass has made is then brought
into scratch pages, time and again, by each way in turn. No time is given unless all ways write the
same.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from td_serve.bench.pass_engine import PassEngine
from td_serve.bench.presets import Preset
from td_serve.bench.restore_worker import BELOW, DENSE, FUSED, WRITTEN
from td_serve.bench.trace_rounds import Prompts, Round
from td_serve.errors import TdServeError
from td_serve.reuse import plan_reuse
from td_serve.sim.layouts import Layout
from td_serve.sim.trace import read_trace
from td_serve.types import SessionId

RECOMPUTED = "recomputed"
CLOSE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""How far keys and values of two ways may be apart, of the largest, by dtype: rotations in float32
round it differently in the end."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Round `number` of a trace, behind the one before it, of its first agents, as many as each of
    `agents` says; `below`, if given, is the URL of a tier to read them from as well."""

    trace: Path
    model: str
    preset: Preset
    agents: tuple[int, ...]
    number: int = 1
    layout: Layout = Layout.HISTORY_FIRST
    window: int = 8192
    dtype: str = "float32"
    repeats: int = 7
    below: str | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way for so many agents: milliseconds for each (the median of all repeats), and how many
    bytes came into pages a second."""

    agents: int
    way: str
    ms: float
    gb_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The quicker of the two ways without a dense copy, for the most agents, against one by way of
    it, and against computing the prompts."""

    restore_speedup_vs_dense: float
    fused_speedup_vs_dense: float
    restore_vs_recompute: float
    below_vs_recompute: float | None = None
    """Of what is read from a tier below first."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    rows: list[Row]
    summary: Summary


def bench_restore(options: Options, say: Callable[[str], None]) -> Result:
    """Measure on an engine of our own. `say` tells the progress.

    Raises TdServeError when the trace does not fit, nothing is blended, or two ways disagree.
    """
    from td_serve.models.resolve import resolve

    trace = read_trace(options.trace)
    most = max(options.agents)
    Prompts.check(trace, most, options.number)
    prompts = Prompts(resolve(options.model), options.window, 1)
    rounds = prompts.rounds(trace, most, options.number - 1, 2, options.layout)
    say("starting the engine")
    tokens = sum(len(one.prompt_token_ids) for one in rounds[1].values())
    room = max(tokens + 64 * most, 2 * options.window)
    engine = PassEngine(resolve(options.model), options.dtype, options.window, room)
    rows: list[Row] = []
    for count in sorted(options.agents):
        some = [dict(list(played.items())[:count]) for played in rounds]
        rows += _measure(engine, trace.name, some, options)
        said = ", ".join(f"{row.way} {row.ms:.1f}" for row in rows if row.agents == count)
        say(f"{count} agents, ms each: {said}")
    return Result(rows=rows, summary=_summary(rows, most))


def _measure(engine: PassEngine, name: str, rounds: Sequence[Round], options: Options) -> list[Row]:
    salt = uuid.uuid4().hex
    sim = SessionId(f"{name}-{salt}")
    before, now = rounds
    head = next(iter(now.values())).head
    engine.play_passes(
        before, plan_reuse(sim, before, options.preset.rule, head), salt, together=True
    )
    reuse = plan_reuse(sim, now, options.preset.rule, head)
    played = engine.play_passes(now, reuse, salt, together=True, release=False)
    if not played.counted:
        raise TdServeError(f"round {options.number}: served exactly, there is nothing to restore")
    found = engine.restored(reuse, options.repeats)
    if options.below is not None:
        found.seconds[BELOW] = engine.restored_below(reuse, options.below, options.repeats)
    engine.release(reuse)
    if not found.apart <= (close := CLOSE[options.dtype]):
        raise TdServeError(f"what two ways restore is {found.apart} apart, expected {close}")
    engine.forget()
    recomputed = engine.play_plain(now, uuid.uuid4().hex).seconds
    count = len(now)
    medians = {way: statistics.median(took) for way, took in found.seconds.items()}
    return [
        Row(
            agents=count,
            way=way,
            ms=round(1e3 * seconds / count, 3),
            gb_s=round(found.bytes / seconds / 1e9, 3),
        )
        for way, seconds in {**medians, RECOMPUTED: recomputed}.items()
    ]


def _summary(rows: Sequence[Row], most: int) -> Summary:
    ms = {row.way: row.ms for row in rows if row.agents == most}
    ours = min(ms[FUSED], ms[WRITTEN])
    return Summary(
        restore_speedup_vs_dense=round(ms[DENSE] / ours, 3),
        fused_speedup_vs_dense=round(ms[DENSE] / ms[FUSED], 3),
        restore_vs_recompute=round(ms[RECOMPUTED] / ours, 3),
        below_vs_recompute=round(ms[RECOMPUTED] / ms[BELOW], 3) if BELOW in ms else None,
    )
