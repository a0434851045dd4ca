"""The reuse bench's result as tables."""

from __future__ import annotations

from rich.table import Table

from td_serve.bench.reuse import VLLM, Result


def speed_table(result: Result) -> Table:
    """Seconds until all first tokens of a round, by way."""
    made = Table(title="a round, until all first tokens")
    for name in ("round", "way", "seconds", "in passes", "tokens computed", "speed-up"):
        made.add_column(name, justify="left" if name == "way" else "right")
    plain = {row.round: row.seconds for row in result.rows if row.way == VLLM}
    for row in result.rows:
        made.add_row(
            str(row.round),
            row.way,
            f"{row.seconds:.2f}",
            f"{row.pass_seconds:.2f}" if row.pass_seconds else "",
            str(row.computed),
            f"{plain[row.round] / row.seconds:.2f}",
        )
    return made


def fidelity_table(result: Result) -> Table:
    """Divergence from exact answers, by preset: mean, and worst of all members."""
    made = Table(title="against full recomputation, nats")
    for name in ("preset", "anew", "KL0", "worst", "KL32", "worst", "top-1", "worst", "match"):
        made.add_column(name, justify="left" if name == "preset" else "right")
    for one in result.fidelity:
        made.add_row(
            f"{one.preset.value}, at random" if one.at_random else one.preset.value,
            f"{one.chosen:.0%}",
            f"{one.kl0_mean:.4f}",
            f"{one.kl0_max:.4f}",
            f"{one.kl32_mean:.4f}",
            f"{one.kl32_max:.4f}",
            f"{one.top1_32:.3f}",
            f"{one.top1_32_min:.3f}",
            "" if one.match_32 is None else f"{one.match_32:.1f}",
        )
    return made
