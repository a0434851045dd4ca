"""A small village plays three rounds on a real deployment: `make demo`.

Starts `serve run clusters/local.yaml` in the background, plays examples/village.jsonl live (what
the model writes is handed on to the next round), shows the numbers and what was said, and stops.
"""

import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console

from td_serve.errors import TdServeError
from td_serve.serve.background import serve_run
from td_serve.sim.member import MemberResult, connect
from td_serve.sim.replay import ReplayConfig, ReplayResult, replay
from td_serve.sim.report import table
from td_serve.sim.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "clusters" / "local.yaml"
VILLAGE = ROOT / "examples" / "village.jsonl"
ROUNDS = 3
MAX_TOKENS = 40
SEED = 11

console = Console(highlight=False)


async def play(url: str) -> ReplayResult:
    """The village's rounds; a line for every agent that has answered."""
    config = ReplayConfig(
        trace=read_trace(VILLAGE),
        rounds=ROUNDS,
        live=True,
        max_tokens=MAX_TOKENS,
        temperature=0.7,
        seed=SEED,
    )

    def answered(member: MemberResult) -> None:
        said = member.error or member.text or ""
        line = f"  round {member.round}  {member.agent:6s} {' '.join(said.split())}"
        console.print(line[: console.width - 1], markup=False)

    async with connect(f"{url}/v1") as client:
        return await replay(config, client, on_member=answered)


def main() -> int:
    started = time.monotonic()
    with console.status("") as status:

        def waiting(seconds: float) -> None:
            status.update(f"starting prefill, decode, coordinator and ingress … {seconds:.0f} s")

        console.print(f"serve run {CLUSTER.relative_to(ROOT)}")
        with serve_run(CLUSTER, on_wait=waiting) as url:
            console.print(f"serving on {url} after {time.monotonic() - started:.0f} s")
            status.update("playing")
            result = asyncio.run(play(url))
            status.update("stopping")
    console.width = max(console.width, 110)
    console.print(table(result))
    for turn in result.rounds[-1].members:
        text = " ".join((turn.text or "").split())
        console.print(f"[bold]{turn.agent}[/bold]: {text}", soft_wrap=True)
    console.print(
        f"\n{ROUNDS} rounds, {result.failures} failed requests, stopped; "
        f"{time.monotonic() - started:.0f} s in all"
    )
    return 1 if result.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TdServeError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
