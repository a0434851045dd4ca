"""What a replay measured: numbers per round and in all, as a table and as rows. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from td_serve.sim.member import MemberResult
from td_serve.sim.replay import ReplayResult, RoundResult


class RoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """One round in numbers. None: no member gave the number.

    Sums and percentiles are over the members that succeeded. The tokens add up: `prompt_tokens ==
    computed_tokens + reused_tokens`; both are None unless the server says of every prompt how much
    of it was cached.
    """

    round: int
    label: str
    agents: int
    wall_s: float
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    prompt_tokens: int
    computed_tokens: int | None
    reused_tokens: int | None
    completion_tokens: int
    decode_tok_s_agent: float | None
    """Median over the agents: each one's tokens after its first text, over its time since then."""
    decode_tok_s_total: float | None
    """All completion tokens over the time from the first agent's first text to the last's end."""
    failures: int
    cut: int
    """Members whose prompt was cut to the window."""
    complete: bool
    members: tuple[MemberResult, ...]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole replay in numbers; see `RoundRow`."""

    trace: str
    sim: str
    model: str
    layout: str
    live: bool
    window: int | None
    counting: str
    agents: int
    rounds: int
    requests: int
    failures: int
    cut: int
    wall_s: float
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    prompt_tokens: int
    computed_tokens: int | None
    reused_tokens: int | None
    completion_tokens: int
    stopped: str | None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The nearest-rank percentile: a value that occurred. None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def row(result: RoundResult, texts: bool = False) -> RoundRow:
    """A round in numbers; `texts` keeps what the agents wrote."""
    good = [m for m in result.members if m.error is None]
    ttft = [m.ttft_ms for m in good if m.ttft_ms is not None]
    rates = [m.decode_tok_s for m in good if m.decode_tok_s is not None]
    completion = sum(m.completion_tokens or 0 for m in good)
    # Members start together, so that their times share an origin to within the sending.
    spans = [(m.ttft_ms, m.latency_ms) for m in good if m.ttft_ms is not None]
    seconds = 0.0
    if spans:
        seconds = 1e-3 * (max(end or 0.0 for _, end in spans) - min(first for first, _ in spans))
    prompt, reused = _tokens(good)
    members = result.members
    if not texts:
        members = tuple(msgspec.structs.replace(m, text=None) for m in members)
    return RoundRow(
        round=result.round,
        label=result.label,
        agents=len(result.members),
        wall_s=result.wall_s,
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p99=percentile(ttft, 99),
        prompt_tokens=prompt,
        computed_tokens=prompt - reused if reused is not None else None,
        reused_tokens=reused,
        completion_tokens=completion,
        decode_tok_s_agent=statistics.median(rates) if rates else None,
        decode_tok_s_total=completion / seconds if seconds > 0 else None,
        failures=len(result.members) - len(good),
        cut=sum(m.cut is not None for m in result.members),
        complete=result.complete,
        members=members,
    )


def summary(result: ReplayResult) -> Summary:
    """A whole replay in numbers."""
    setup = result.setup
    members = [m for r in result.rounds for m in r.members]
    good = [m for m in members if m.error is None]
    ttft = [m.ttft_ms for m in good if m.ttft_ms is not None]
    prompt, reused = _tokens(good)
    return Summary(
        trace=setup.trace,
        sim=setup.sim,
        model=setup.model,
        layout=setup.layout.value,
        live=setup.live,
        window=setup.window,
        counting=setup.counting,
        agents=len(setup.agents),
        rounds=len(result.rounds),
        requests=len(members),
        failures=result.failures,
        cut=sum(m.cut is not None for m in members),
        wall_s=math.fsum(r.wall_s for r in result.rounds),
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p99=percentile(ttft, 99),
        prompt_tokens=prompt,
        computed_tokens=prompt - reused if reused is not None else None,
        reused_tokens=reused,
        completion_tokens=sum(m.completion_tokens or 0 for m in good),
        stopped=result.stopped,
    )


def table(result: ReplayResult) -> Table:
    """A line per round, and one for all."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_footer=True)
    total = summary(result)
    columns: Sequence[tuple[str, str]] = (
        ("round", "all"),
        ("agents", str(total.agents)),
        ("wall s", _number(total.wall_s, 2)),
        ("TTFT ms\np50", _number(total.ttft_ms_p50)),
        ("TTFT ms\np99", _number(total.ttft_ms_p99)),
        ("prompt\ntokens", str(total.prompt_tokens)),
        ("com-\nputed", _number(total.computed_tokens)),
        ("reused", _number(total.reused_tokens)),
        ("written", str(total.completion_tokens)),
        ("tok/s\nagent", ""),
        ("tok/s\nall", ""),
        ("cut", str(total.cut)),
        ("failed", str(total.failures)),
    )
    for heading, footer in columns:
        made.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for result_ in result.rounds:
        r = row(result_)
        made.add_row(
            str(r.round) if r.complete else f"{r.round} (cut off)",
            str(r.agents),
            _number(r.wall_s, 2),
            _number(r.ttft_ms_p50),
            _number(r.ttft_ms_p99),
            str(r.prompt_tokens),
            _number(r.computed_tokens),
            _number(r.reused_tokens),
            str(r.completion_tokens),
            _number(r.decode_tok_s_agent, 1),
            _number(r.decode_tok_s_total, 1),
            str(r.cut),
            str(r.failures),
        )
    return made


def describe_cut(member: MemberResult) -> str:
    """What was left out of a member's prompt, on one line; empty if nothing was."""
    cut = member.cut
    if cut is None:
        return ""
    kinds: dict[str, list[int]] = {}
    for part in cut.dropped:
        kinds.setdefault(part.kind.value, []).append(part.round)
    what = ", ".join(
        f"{len(rounds)} {kind} of rounds {min(rounds)}–{max(rounds)}"
        for kind, rounds in kinds.items()
    )
    return (
        f"round {member.round}, {member.agent}: cut from {cut.tokens_before} to {cut.tokens} "
        f"tokens: left out {what}"
    )


def report(result: ReplayResult, texts: bool = False) -> dict[str, Any]:
    """Rows and summary for `td_serve.report.envelope`."""
    return {"rows": [row(r, texts) for r in result.rounds], "summary": summary(result)}


def _tokens(members: Sequence[MemberResult]) -> tuple[int, int | None]:
    """Prompt tokens, and how many of them were reused (None if a server did not say)."""
    prompt = sum(m.prompt_tokens or 0 for m in members)
    cached = [m.cached_tokens for m in members if m.cached_tokens is not None]
    if not members or len(cached) < len(members):
        return prompt, None
    return prompt, sum(cached)


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
