"""`td-serve bench WHAT`: measure this build on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from td_serve.errors import TdServeError

_DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command. Its `func` returns the exit code and raises TdServeError."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this build on this machine",
        description="Measure this build on this machine.",
    )
    benches = parser.add_subparsers(title="benches", metavar="WHAT", required=True)
    _add_serve(benches)
    _add_bidirectional(benches)
    _add_reuse(benches)
    _add_storage(benches)
    _add_restore(benches)


def _add_serve(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = benches.add_parser(
        "serve",
        help="start-up, memory, and what ingress and coordinator add to a request",
        description="Start a cluster file's deployment on a Ray of its own, and measure: seconds "
        "from launch to first token; peak memory under load; and, with a tiny random model, what "
        "ingress and coordinator add to a request, against calling the engines directly.",
    )
    serve.add_argument("--cluster", type=Path, default=Path("clusters/local.yaml"), metavar="FILE")
    serve.add_argument(
        "--requests",
        type=_positive,
        default=320,
        metavar="N",
        help="by each way at each number in flight (default: 320)",
    )
    serve.add_argument(
        "--concurrency",
        type=_numbers,
        default=(1, 8, 32),
        metavar="N,…",
        help="requests in flight (default: 1,8,32)",
    )
    serve.add_argument("--seed", type=int, default=0, metavar="S", help="of all prompts")
    serve.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")
    serve.set_defaults(func=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Measure, print the table, write the report.

    Raises:
        TdServeError: something could not be started or served; nothing is left running.
    """
    from rich.console import Console

    from td_serve.bench.latency import table
    from td_serve.bench.serve import Options, bench_serve
    from td_serve.report import envelope, write_json

    options = Options(
        cluster=args.cluster,
        requests=args.requests,
        concurrency=args.concurrency,
        seed=args.seed,
    )
    result = bench_serve(options, lambda line: print(line, file=sys.stderr, flush=True))

    summary = result.summary
    out = Console(highlight=False)
    out.width = max(out.width, 100)  # a table cut to a narrow terminal would lose digits
    out.print(table(result.rows))
    by_kind = ", ".join(f"{kind} {gib:.2f}" for kind, gib in summary.rss_gib_by_kind.items())
    out.print(f"launch to first token: {summary.start_to_first_token_s:.1f} s")
    out.print(f"peak memory: {summary.peak_rss_gib:.2f} GiB ({by_kind})", soft_wrap=True)
    if args.json is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        write_json(args.json, envelope(command, args.seed, result.rows, summary))
    return 0


def _add_bidirectional(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = benches.add_parser(
        "bidirectional",
        help="what reading a conversation's KV back saves on its next turn",
        description="Start one prefill and one decode engine and play conversations of two turns, "
        "with the first turn's KV read back from the decode engine and without, side by side: time "
        "to first token, and how prefill divides into computing and reading.",
    )
    bench.add_argument("--model", default="smollm2-135m-instruct", metavar="MODEL")
    bench.add_argument(
        "--prompt-tokens",
        type=_numbers,
        default=(512, 1024, 2048, 4096),
        metavar="N,…",
        help="of the second turn's prompt (default: 512,1024,2048,4096)",
    )
    bench.add_argument(
        "--repeats", type=_positive, default=3, metavar="N", help="at each length (default: 3)"
    )
    bench.add_argument(
        "--in-flight",
        type=_positive,
        default=8,
        metavar="N",
        help="requests at once, where decoding is measured (default: 8)",
    )
    why = bench.add_mutually_exclusive_group()
    why.add_argument(
        "--evicted",
        action="store_true",
        help="prefill has a prefix cache, filled by other traffic between the turns",
    )
    why.add_argument(
        "--p-cold",
        action="store_true",
        help="prefill has a prefix cache, and the second turn goes to another prefill engine",
    )
    bench.add_argument(
        "--threshold",
        type=_count,
        default=64,
        metavar="N",
        help="fewer tokens are computed, not read (default: 64)",
    )
    bench.add_argument("--dtype", default="float32", choices=_DTYPES, help="(default: float32)")
    bench.add_argument("--seed", type=int, default=0, metavar="S", help="of all prompts")
    bench.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")
    bench.add_argument("--plot", type=Path, metavar="OUT.png", help="draw them here")
    bench.set_defaults(func=run_bidirectional)


def run_bidirectional(args: argparse.Namespace) -> int:
    """Measure, print the table, write report and picture.

    Raises:
        TdServeError: an engine could not be started, or the two ways disagree.
    """
    import asyncio

    from rich.console import Console

    from td_serve.bench.bidirectional import bench_bidirectional
    from td_serve.bench.bidirectional_report import plot, table
    from td_serve.bench.turns import Options, Scenario
    from td_serve.report import envelope, write_json

    scenario = Scenario.NO_CACHE
    if args.evicted or args.p_cold:
        scenario = Scenario.EVICTED if args.evicted else Scenario.P_COLD
    options = Options(
        model=args.model,
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeats,
        in_flight=args.in_flight,
        scenario=scenario,
        threshold=args.threshold,
        dtype=args.dtype,
        seed=args.seed,
    )
    _check_outputs(args)
    result = asyncio.run(
        bench_bidirectional(options, lambda line: print(line, file=sys.stderr, flush=True))
    )
    out = Console(highlight=False)
    out.width = max(out.width, 110)
    out.print(table(result))
    out.print(f"largest speed-up: {result.summary.speedup_max:.2f}")
    if (ratio := result.summary.growth_ratio) is not None:
        out.print(f"TTFT grows by {100 * ratio:.0f} % of what it grows without")
    load = result.summary.load
    out.print(
        f"decoding {load.in_flight} at once, ms a token: {load.decode_on_ms:.1f} with turns kept, "
        f"{load.decode_off_ms:.1f} without"
    )
    out.print(
        f"kept for next turns at most: {100 * result.summary.retained_pool_share:.0f} % of the pool"
    )
    if args.json is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        write_json(args.json, envelope(command, args.seed, result.rows, result.summary))
    if args.plot is not None:
        plot(result, args.model, args.plot)
    return 0


def _add_reuse(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = benches.add_parser(
        "reuse",
        help="what prefilling a round as one unit saves, and what it costs in fidelity",
        description="Play rounds of a recorded trace on one engine: with vLLM's own prefix "
        "caching, with the shared text first, and by passes with each preset's rule, together and "
        "member by member. Says how long all first tokens took, and how far answers are from exact "
        "ones.",
    )
    bench.add_argument("--trace", type=Path, required=True, metavar="TRACE")
    bench.add_argument("--model", default="smollm2-135m-instruct", metavar="MODEL")
    bench.add_argument(
        "--agents",
        type=_positive,
        metavar="N",
        help="the first N of the agents, who hear them all (default: all)",
    )
    bench.add_argument(
        "--first", type=_positive, default=1, metavar="T", help="first round (default: 1)"
    )
    bench.add_argument(
        "--rounds", type=_positive, default=1, metavar="R", help="how many (default: 1)"
    )
    bench.add_argument(
        "--past",
        type=_positive,
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
    bench.add_argument(
        "--layout",
        default="history_first",
        metavar="NAME",
        help="history_first (default) or transcript",
    )
    bench.add_argument("--window", type=_positive, default=8192, metavar="N", help="in tokens")
    bench.add_argument("--dtype", default="float32", choices=_DTYPES, help="(default: float32)")
    bench.add_argument("--fidelity", action="store_true", help="compare answers, too")
    bench.add_argument("--no-speed", action="store_true", help="fidelity alone")
    bench.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")
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
    from td_serve.report import envelope, write_json

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
    _check_outputs(args)
    result = bench_reuse(options, lambda line: print(line, file=sys.stderr, flush=True))
    out = Console(highlight=False)
    out.width = max(out.width, 120)
    if result.rows:
        out.print(speed_table(result))
    if result.fidelity:
        out.print(fidelity_table(result))
    if result.cut:
        out.print(f"{result.cut} prompts did not fit the window of {options.window} and were cut")
    if args.json is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        rows = {"speed": result.rows, "fidelity": result.fidelity}
        write_json(args.json, envelope(command, 0, rows, result.summary))
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
    bench.add_argument("--trace", type=Path, required=True, metavar="TRACE")
    bench.add_argument("--model", default="smollm2-135m-instruct", metavar="MODEL")
    bench.add_argument(
        "--agents",
        type=_positive,
        metavar="N",
        help="the first N of the agents, who hear them all (default: all)",
    )
    bench.add_argument(
        "--rounds", type=_positive, default=8, metavar="R", help="from 1 to R (default: 8)"
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
        "private KV, too (default: lossless,int8,int4,int8+int8)",
    )
    bench.add_argument(
        "--layout",
        default="transcript",
        metavar="NAME",
        help="history_first or transcript (default)",
    )
    bench.add_argument("--window", type=_positive, default=8192, metavar="N", help="in tokens")
    bench.add_argument("--dtype", default="float32", choices=_DTYPES, help="(default: float32)")
    bench.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")
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
    from td_serve.report import envelope, write_json

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
    _check_outputs(args)
    result = bench_storage(options, lambda line: print(line, file=sys.stderr, flush=True))
    out = Console(highlight=False)
    out.width = max(out.width, 150)
    out.print(table(result))
    if result.cut:
        out.print(f"{result.cut} prompts did not fit the window of {options.window} and were cut")
    if args.json is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        write_json(args.json, envelope(command, 0, result.rows, result.summary))
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
    bench.add_argument("--trace", type=Path, required=True, metavar="TRACE")
    bench.add_argument("--model", default="smollm2-135m-instruct", metavar="MODEL")
    bench.add_argument(
        "--agents",
        type=_numbers,
        default=(3, 5, 10),
        metavar="N,…",
        help="how many of the first agents (default: 3,5,10)",
    )
    bench.add_argument(
        "--round", type=_positive, default=1, metavar="T", help="which one (default: 1)"
    )
    bench.add_argument(
        "--preset", default="td", metavar="NAME", help="a rule, as in bench reuse (default: td)"
    )
    bench.add_argument(
        "--layout",
        default="history_first",
        metavar="NAME",
        help="history_first (default) or transcript",
    )
    bench.add_argument(
        "--repeats", type=_positive, default=7, metavar="N", help="of each way (default: 7)"
    )
    bench.add_argument("--window", type=_positive, default=8192, metavar="N", help="in tokens")
    bench.add_argument("--dtype", default="float32", choices=_DTYPES, help="(default: float32)")
    bench.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")
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
    from td_serve.report import envelope, write_json

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
    )
    _check_outputs(args)
    result = bench_restore(options, lambda line: print(line, file=sys.stderr, flush=True))
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
    if args.json is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        write_json(args.json, envelope(command, 0, result.rows, summary))
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


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises TdServeError where what is measured could not be written in the end."""
    for path in (args.json, args.plot):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise TdServeError(f"{path}: cannot be written: {path.absolute().parent} is no folder")


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


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
