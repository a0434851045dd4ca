"""`td-serve bench WHAT`: measure this build on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command. Its `func` returns the exit code and raises TdServeError."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this build on this machine",
        description="Measure this build on this machine.",
    )
    benches = parser.add_subparsers(title="benches", metavar="WHAT", required=True)
    _add_serve(benches)


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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
