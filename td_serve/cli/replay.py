"""`td-serve replay`: play a recorded trace through a running endpoint and say how it did."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from td_serve.sim.layouts import Layout

if TYPE_CHECKING:
    from rich.progress import TaskID

    from td_serve.sim.member import MemberResult
    from td_serve.sim.replay import ReplayConfig, ReplayResult, RoundResult, Setup

EXIT_FAILURES = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
INTERRUPTED = "interrupted"

_LEAST_WIDTH = 100  # columns that the table needs


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command. Its `func` returns the exit code and raises TdServeError."""
    parser = subparsers.add_parser(
        "replay",
        help="play a recorded trace of rounds through a running endpoint",
        description="Play an allgather-trace/1 file through an OpenAI-compatible endpoint: each "
        "round all agents at once, then the next. Exit code 1 if a request failed.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="trace file, plain or gzipped")
    parser.add_argument("--url", required=True, help="endpoint, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="model name (default: the only one served)")
    parser.add_argument("--api-key", help="default: OPENAI_API_KEY, else 'none'")

    what = parser.add_argument_group("what is played")
    what.add_argument("--agents", type=_positive, metavar="N", help="the first N (default: all)")
    what.add_argument("--rounds", type=_positive, metavar="R", help="R rounds (default: all)")
    what.add_argument("--first-round", type=_natural, default=0, metavar="K")
    what.add_argument(
        "--layout",
        choices=[layout.value for layout in Layout],
        default=Layout.HISTORY_FIRST.value,
        help="where the shared blocks stand in a prompt",
    )
    what.add_argument(
        "--live",
        action="store_true",
        help="feed the model's own outputs to the next round, not the recorded ones",
    )
    what.add_argument(
        "--window",
        type=_positive,
        metavar="TOKENS",
        help="cut prompts to this (default: what the server says)",
    )
    what.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="model directory to count tokens with"
    )

    how = parser.add_argument_group("how it is asked")
    how.add_argument("--max-tokens", type=_positive, default=128, metavar="N")
    how.add_argument("--temperature", type=float, default=0.0, metavar="T")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--sim", metavar="ID", help="session id (default: a new one)")
    how.add_argument(
        "--deadline-ms", type=_positive, metavar="D", help="how long a round may be gathered"
    )
    how.add_argument(
        "--no-round", action="store_true", help="send plain requests that name no round"
    )
    how.add_argument("--max-concurrency", type=_positive, metavar="N", help="requests at once")

    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", type=Path, metavar="OUT", help="write all numbers here")
    out.add_argument("--texts", action="store_true", help="with the agents' texts")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Replay, print the table, write the report. Returns the exit code.

    Raises:
        TdServeError: nothing could be played, or the report could not be written.
    """
    # Here, so that `td-serve --help` and other commands do not wait for the OpenAI client.
    from rich.console import Console

    from td_serve.report import envelope, write_json
    from td_serve.sim.report import report, table

    config = _config(args)
    with _Watch() as watch:
        result: ReplayResult | None
        try:
            result = asyncio.run(_play(config, args.url, args.api_key, watch))
        except KeyboardInterrupt:
            result = watch.interrupted()
    if result is None:
        return EXIT_INTERRUPTED

    # In a narrow terminal lines may wrap; a table cut to its width would lose digits.
    out = Console(highlight=False)
    out.width = max(out.width, _LEAST_WIDTH)
    out.print(_heading(result), markup=False, soft_wrap=True)
    out.print(table(result))
    if result.stopped is not None:
        out.print(f"stopped: {result.stopped}", markup=False, soft_wrap=True)
    if args.json is not None:
        found = report(result, texts=args.texts)
        write_json(
            args.json, envelope(_command(sys.argv), args.seed, found["rows"], found["summary"])
        )
    if result.stopped == INTERRUPTED:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if result.failures else 0


async def _play(
    config: "ReplayConfig", url: str, api_key: str | None, watch: "_Watch"
) -> "ReplayResult":
    from td_serve.sim.member import connect
    from td_serve.sim.replay import replay

    async with connect(url, api_key) as client:
        return await replay(
            config,
            client,
            on_start=watch.on_start,
            on_member=watch.on_member,
            on_round=watch.on_round,
        )


class _Watch:
    """Shows a replay's progress and trouble on stderr, and keeps what an interrupt would lose."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("answers"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
            disable=not sys.stderr.isatty(),
        )
        self._task: TaskID | None = None
        self._setup: Setup | None = None
        self._rounds: list[RoundResult] = []

    def __enter__(self) -> "_Watch":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def on_start(self, setup: "Setup") -> None:
        self._setup = setup
        self._task = self._progress.add_task(
            setup.trace, total=len(setup.agents) * len(setup.rounds)
        )
        if setup.window is None:
            self._say("the server does not say how long its window is: no prompt is cut")
        elif not setup.counting_exact:
            self._say(f"prompts are measured against the window by {setup.counting}")

    def on_member(self, member: "MemberResult") -> None:
        from td_serve.sim.report import describe_cut

        if member.error is not None:
            self._say(f"round {member.round}, {member.agent}: failed: {member.error}")
        if member.cut is not None:
            self._say(describe_cut(member))
        if self._task is not None:
            self._progress.update(
                self._task, advance=1, description=f"{self._name} round {member.round}"
            )

    def on_round(self, result: "RoundResult") -> None:
        self._rounds.append(result)
        if self._progress.disable and self._setup is not None:
            # In a log there is no bar, and a replay may take minutes.
            total = len(self._setup.rounds)
            self._say(f"{self._name}: {len(self._rounds)} of {total} rounds")

    def interrupted(self) -> "ReplayResult | None":
        """What had been measured when the replay was interrupted; None before it began."""
        from td_serve.sim.replay import ReplayResult

        if self._setup is None:
            return None
        return ReplayResult(setup=self._setup, rounds=tuple(self._rounds), stopped=INTERRUPTED)

    @property
    def _name(self) -> str:
        return self._setup.trace if self._setup is not None else ""

    def _say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, soft_wrap=True)


def _config(args: argparse.Namespace) -> "ReplayConfig":
    from td_serve.sim.replay import ReplayConfig, new_sim
    from td_serve.sim.trace import read_trace
    from td_serve.types import SessionId

    return ReplayConfig(
        trace=read_trace(args.trace),
        agents=args.agents,
        first_round=args.first_round,
        rounds=args.rounds,
        layout=Layout(args.layout),
        live=args.live,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        as_round=not args.no_round,
        deadline_ms=args.deadline_ms,
        max_concurrency=args.max_concurrency,
        sim=SessionId(args.sim) if args.sim else new_sim(),
        model=args.model,
        window=args.window,
        tokenizer=args.tokenizer,
    )


def _heading(result: "ReplayResult") -> str:
    setup = result.setup
    fed = "the model's outputs" if setup.live else "recorded outputs"
    window = f"window {setup.window}" if setup.window is not None else "window unknown"
    return (
        f"{setup.trace} · {setup.model} · {len(setup.agents)} agents · {setup.layout.value} · "
        f"{fed} fed back · {window} · sim {setup.sim}"
    )


def _command(argv: Sequence[str]) -> list[str]:
    """The command line for the report, without the key: reports are passed around."""
    shown = [Path(argv[0]).name]
    hide = False
    for word in argv[1:]:
        if hide:
            word, hide = "***", False
        elif word == "--api-key":
            hide = True
        elif word.startswith("--api-key="):
            word = "--api-key=***"
        shown.append(word)
    return shown


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value
