"""The bidirectional bench's result, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from td_serve.bench.bidirectional import Result
from td_serve.errors import TdServeError


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
