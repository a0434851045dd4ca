"""The reuse bench's result as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from td_serve.bench.reuse_rows import VLLM, Result, Row
from td_serve.errors import TdServeError

_PHASES = ("canonical", "choice", "rows", "restore", "suffix")


def speed_table(result: Result) -> Table:
    """Seconds until all first tokens of a round, by way."""
    made = Table(title="a round, until all first tokens")
    for name in ("round", "way", "seconds", *_PHASES, "computed", "speed-up"):
        made.add_column(name, justify="left" if name == "way" else "right")
    plain = {row.round: row.seconds for row in result.rows if row.way == VLLM}
    for row in result.rows:
        made.add_row(
            str(row.round),
            row.way,
            f"{row.seconds:.2f}",
            *(f"{value:.2f}" if value else "" for value in _phases(row)),
            str(row.computed),
            f"{plain[row.round] / row.seconds:.2f}",
        )
    return made


def _phases(row: Row) -> tuple[float, ...]:
    return row.canonical_s, row.choice_s, row.rows_s, row.restore_s, row.suffix_s


def fidelity_table(result: Result) -> Table:
    """Divergence from exact answers, by preset: mean, and worst of all members."""
    made = Table(title="against full recomputation, nats")
    for name in (
        "preset",
        "anew",
        "alone",
        "KL0",
        "worst",
        "KL32",
        "worst",
        "top-1",
        "worst",
        "match",
    ):
        made.add_column(name, justify="left" if name == "preset" else "right")
    for one in result.fidelity:
        made.add_row(
            f"{one.preset.value}, at random" if one.at_random else one.preset.value,
            f"{one.chosen:.0%}",
            str(one.alone or ""),
            f"{one.kl0_mean:.4f}",
            f"{one.kl0_max:.4f}",
            f"{one.kl32_mean:.4f}",
            f"{one.kl32_max:.4f}",
            f"{one.top1_32:.3f}",
            f"{one.top1_32_min:.3f}",
            "" if one.match_32 is None else f"{one.match_32:.1f}",
        )
    return made


def plot(result: Result, title: str, path: Path) -> None:
    """Write one picture: seconds a round by way and phase, and divergence by preset.

    Raises TdServeError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [draw for draw, found in ((_seconds, result.rows), (_nats, result.fidelity)) if found]
    figure = Figure(figsize=(5.5 * len(drawn), 4.2), layout="constrained")
    for draw, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        draw(axes, result)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise TdServeError(f"{path}: cannot be written: {error}") from error


def _seconds(axes: Any, result: Result) -> None:
    ways = list(dict.fromkeys(row.way for row in result.rows))[::-1]
    begin = [0.0] * len(ways)
    for number, phase in enumerate(_PHASES):
        width = [
            sum(_phases(row)[number] for row in result.rows if row.way == way)
            / sum(row.way == way for row in result.rows)
            for way in ways
        ]
        axes.barh(ways, width, left=begin, label=phase)
        begin = [a + b for a, b in zip(begin, width, strict=True)]
    axes.set(xlabel="seconds until all first tokens, mean of rounds")
    axes.legend()


def _nats(axes: Any, result: Result) -> None:
    close = result.fidelity[::-1]
    names = [f"{one.preset.value}{', at random' if one.at_random else ''}" for one in close]
    places = range(len(close))
    axes.barh([y + 0.2 for y in places], [one.kl0_mean for one in close], 0.38, label="first token")
    axes.barh([y - 0.2 for y in places], [one.kl32_mean for one in close], 0.38, label="32 tokens")
    axes.set_yticks(list(places), names)
    axes.set(xlabel="divergence from full recomputation, nats, mean")
    axes.legend()
