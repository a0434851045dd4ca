"""The benches that play a recorded trace on an engine of their own: reuse, storage, restore."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from td_serve.cli.arguments import DTYPES, check_outputs, numbers, positive, tell, write_report
from td_serve.errors import TdServeError


def add_benches(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them. Their `func` returns the exit code and raises TdServeError."""
    _add_reuse(benches)
    _add_storage(benches)
    _add_restore(benches)


def _reads_trace(bench: argparse.ArgumentParser, layout: str) -> None:
    """Add what all these benches are told, and their default layout."""
    bench.add_argument("--trace", type=Path, required=True, metavar="TRACE")
    bench.add_argument("--model", default="smollm2-135m-instruct", metavar="MODEL")
    bench.add_argument(
        "--layout",
        default=layout,
        metavar="NAME",
        help=f"history_first or transcript (default: {layout})",
    )
    bench.add_argument("--window", type=positive, default=8192, metavar="N", help="in tokens")
    bench.add_argument("--dtype", default="float32", choices=DTYPES, help="(default: float32)")
    bench.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")


def _asks_agents(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--agents",
        type=positive,
        metavar="N",
        help="the first N of the agents, who hear them all (default: all)",
    )


def _add_reuse(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = benches.add_parser(
        "reuse",
        help="what prefilling a round as one unit saves, and what it costs in fidelity",
        description="Play rounds of a recorded trace on one engine: with vLLM's own prefix "
        "caching, with the shared text first, and by passes with each preset's rule, together and "
        "member by member. Says how long all first tokens took, and how far answers are from exact "
        "ones.",
    )
    _reads_trace(bench, "history_first")
    _asks_agents(bench)
    bench.add_argument(
        "--first", type=positive, default=1, metavar="T", help="first round (default: 1)"
    )
    bench.add_argument(
        "--rounds", type=positive, default=1, metavar="R", help="how many (default: 1)"
    )
    bench.add_argument(
        "--past",
        type=positive,
        default=1,
        metavar="N",
        help="play so many rounds before each, to begin from what they leave (default: 1)",
    )
    bench.add_argument(
        "--presets",
        default="td,none",
        metavar="NAME,…",
        help="td, none, first_k, first_pages, hkvd, weighed, first_k+hkvd, author, paper, full; "
        "the summary is of the first (default: td,none)",
    )
    bench.add_argument("--fidelity", action="store_true", help="compare answers, too")
    bench.add_argument("--no-speed", action="store_true", help="fidelity alone")
    bench.add_argument("--plot", type=Path, metavar="OUT.png", help="write a picture here")
    bench.set_defaults(func=run_reuse)


def run_reuse(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the report.

    Raises:
        TdServeError: the trace does not fit, or a pass that computes everything is not exact.
    """
    from rich.console import Console

    from td_serve.bench.presets import Preset
    from td_serve.bench.reuse import Options, bench_reuse
    from td_serve.bench.reuse_report import fidelity_table, plot, speed_table

    options = Options(
        trace=args.trace,
        model=args.model,
        presets=_presets(args.presets, Preset),
        agents=args.agents,
        first=args.first,
        rounds=args.rounds,
        past=args.past,
        layout=_layout(args.layout),
        window=args.window,
        dtype=args.dtype,
        speed=not args.no_speed,
        fidelity=args.fidelity or args.no_speed,
    )
    check_outputs(args)
    result = bench_reuse(options, tell)
    out = Console(highlight=False)
    out.width = max(out.width, 120)
    if result.rows:
        out.print(speed_table(result))
    if result.fidelity:
        out.print(fidelity_table(result))
    if result.cut:
        out.print(f"{result.cut} prompts did not fit the window of {options.window} and were cut")
    rows = {"speed": result.rows, "fidelity": result.fidelity}
    write_report(args.json, 0, rows, result.summary)
    if args.plot is not None:
        agents = "all" if args.agents is None else str(args.agents)
        plot(result, f"{args.model}, {args.trace.name}, {agents} agents", args.plot)
    return 0


def _add_storage(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = benches.add_parser(
        "storage",
        help="what a round's KV takes when it is kept as a family",
        description="Play rounds of a recorded trace on one engine by passes, and count after each "
        "what is kept for its members: against as many dense caches, against one dense cache and "
        "blocks that differ from it, and against the bound, every shared token once. Says what "
        "codecs save, and how far they move what follows.",
    )
    _reads_trace(bench, "transcript")
    _asks_agents(bench)
    bench.add_argument(
        "--rounds", type=positive, default=8, metavar="R", help="from 1 to R (default: 8)"
    )
    bench.add_argument(
        "--presets",
        default="td",
        metavar="NAME,…",
        help="rules, as in bench reuse; the summary is of the first (default: td)",
    )
    bench.add_argument(
        "--codecs",
        default="lossless,int8,int4,int8+int8",
        metavar="NAME,…",
        help="how what was computed anew of shared texts is kept: lossless, int8 or int4; +int8: "
        "private KV, too; lossless comes first in any case (default: lossless,int8,int4,int8+int8)",
    )
    bench.add_argument("--plot", type=Path, metavar="OUT.png", help="write a picture here")
    bench.set_defaults(func=run_storage)


def run_storage(args: argparse.Namespace) -> int:
    """Count, print the table, write the report.

    Raises:
        TdServeError: the trace does not fit, or there is nothing to keep.
    """
    from rich.console import Console

    from td_serve.bench.presets import Preset
    from td_serve.bench.storage import Options, bench_storage
    from td_serve.bench.storage_report import plot, table

    options = Options(
        trace=args.trace,
        model=args.model,
        presets=_presets(args.presets, Preset),
        codecs=_codecs(args.codecs),
        agents=args.agents,
        last=args.rounds,
        layout=_layout(args.layout),
        window=args.window,
        dtype=args.dtype,
    )
    check_outputs(args)
    result = bench_storage(options, tell)
    out = Console(highlight=False)
    out.width = max(out.width, 150)
    out.print(table(result))
    if result.cut:
        out.print(f"{result.cut} prompts did not fit the window of {options.window} and were cut")
    write_report(args.json, 0, result.rows, result.summary)
    if args.plot is not None:
        plot(result, f"{args.model}, {args.trace.name}, {args.layout}", args.plot)
    return 0


def _add_restore(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = benches.add_parser(
        "restore",
        help="how quickly a round's KV comes back into an engine's pages",
        description="Play a round of a recorded trace on one engine by a pass, and bring what it "
        "has made into pages: in one pass over each layer, part by part, and by way of a dense "
        "copy; beside it, the time to compute the prompts.",
    )
    _reads_trace(bench, "history_first")
    bench.add_argument(
        "--agents",
        type=numbers,
        default=(3, 5, 10),
        metavar="N,…",
        help="how many of the first agents (default: 3,5,10)",
    )
    bench.add_argument(
        "--round", type=positive, default=1, metavar="T", help="which one (default: 1)"
    )
    bench.add_argument(
        "--preset", default="td", metavar="NAME", help="a rule, as in bench reuse (default: td)"
    )
    bench.add_argument(
        "--repeats", type=positive, default=7, metavar="N", help="of each way (default: 7)"
    )
    bench.add_argument(
        "--below",
        metavar="URL",
        help="read it from there, too: fs:///path or redis://host:port (needs `make lmcache`)",
    )
    bench.set_defaults(func=run_restore, plot=None)


def run_restore(args: argparse.Namespace) -> int:
    """Measure, print the table, write the report.

    Raises:
        TdServeError: the trace does not fit, nothing is blended, or two ways disagree.
    """
    from rich.console import Console
    from rich.table import Table

    from td_serve.bench.presets import Preset
    from td_serve.bench.restore import Options, bench_restore

    (preset,) = _presets(args.preset, Preset)
    options = Options(
        trace=args.trace,
        model=args.model,
        preset=preset,
        agents=args.agents,
        number=args.round,
        layout=_layout(args.layout),
        window=args.window,
        dtype=args.dtype,
        repeats=args.repeats,
        below=args.below,
    )
    check_outputs(args)
    result = bench_restore(options, tell)
    table = Table(title="a member's KV, until it is in the engine's pages")
    for name in ("agents", "way", "ms each", "GB/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in result.rows:
        table.add_row(str(row.agents), row.way, f"{row.ms:.2f}", f"{row.gb_s:.2f}")
    out = Console(highlight=False)
    out.print(table)
    summary = result.summary
    out.print(f"against a dense copy: {summary.restore_speedup_vs_dense:.2f}")
    out.print(f"against computing it: {summary.restore_vs_recompute:.1f}")
    if summary.below_vs_recompute is not None:
        out.print(f"read from {args.below}, against computing it: {summary.below_vs_recompute:.1f}")
    write_report(args.json, 0, result.rows, summary)
    return 0


def _codecs(text: str) -> Any:
    """Raises TdServeError when a name is no pair of codecs."""
    from td_serve.store.codecs import Codec, Codecs

    found = []
    for name in text.split(","):
        diffs, _, private = name.partition("+")
        try:
            found.append(Codecs(Codec(diffs), Codec(private or "lossless")))
        except ValueError:
            raise TdServeError(
                f"--codecs: {name!r}, expected lossless, int8 or int4, with +int8 or without"
            ) from None
    return tuple(found)


def _layout(name: str) -> Any:
    """Raises TdServeError where what is shared would come first: then there is nothing to blend."""
    from td_serve.sim.layouts import Layout

    names = [Layout.HISTORY_FIRST.value, Layout.TRANSCRIPT.value]
    if name not in names:
        raise TdServeError(f"--layout: {name!r}, expected {' or '.join(names)}")
    return Layout(name)


def _presets(text: str, kind: Any) -> Any:
    """Raises TdServeError when a name is no preset."""
    names = [one.value for one in kind]
    for name in text.split(","):
        if name not in names:
            raise TdServeError(f"--presets: {name!r}, expected some of {', '.join(names)}")
    return tuple(kind(name) for name in text.split(","))
