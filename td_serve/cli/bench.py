"""`td-serve bench WHAT`: measure this build on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from td_serve.cli.arguments import (
    DTYPES,
    check_outputs,
    count,
    numbers,
    positive,
    tell,
    write_report,
)
from td_serve.cli.trace_benches import add_benches


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
    add_benches(benches)


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
        type=positive,
        default=320,
        metavar="N",
        help="by each way at each number in flight (default: 320)",
    )
    serve.add_argument(
        "--concurrency",
        type=numbers,
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

    options = Options(
        cluster=args.cluster,
        requests=args.requests,
        concurrency=args.concurrency,
        seed=args.seed,
    )
    result = bench_serve(options, tell)

    summary = result.summary
    out = Console(highlight=False)
    out.width = max(out.width, 100)  # a table cut to a narrow terminal would lose digits
    out.print(table(result.rows))
    by_kind = ", ".join(f"{kind} {gib:.2f}" for kind, gib in summary.rss_gib_by_kind.items())
    out.print(f"launch to first token: {summary.start_to_first_token_s:.1f} s")
    out.print(f"peak memory: {summary.peak_rss_gib:.2f} GiB ({by_kind})", soft_wrap=True)
    write_report(args.json, args.seed, result.rows, summary)
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
        type=numbers,
        default=(512, 1024, 2048, 4096),
        metavar="N,…",
        help="of the second turn's prompt (default: 512,1024,2048,4096)",
    )
    bench.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="at each length (default: 3)"
    )
    bench.add_argument(
        "--in-flight",
        type=positive,
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
        type=count,
        default=64,
        metavar="N",
        help="fewer tokens are computed, not read (default: 64)",
    )
    bench.add_argument("--dtype", default="float32", choices=DTYPES, help="(default: float32)")
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
    check_outputs(args)
    result = asyncio.run(bench_bidirectional(options, tell))
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
    write_report(args.json, args.seed, result.rows, result.summary)
    if args.plot is not None:
        plot(result, args.model, args.plot)
    return 0
