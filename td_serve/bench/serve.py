"""What does serving cost: time to the first token after a launch, memory, and time per request?"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from td_serve.bench.latency import Row
from td_serve.bench.overhead import Prompts, measure_overhead
from td_serve.bench.private_cluster import deployed, private_ray
from td_serve.bench.start import Start, measure_start
from td_serve.config import DeploymentConfig
from td_serve.errors import ConfigError

AT = 8
"""The number in flight whose overhead stands in the summary."""

_READY_PATIENCE_S = 60.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: `requests` by each way at each number in flight."""

    cluster: Path
    requests: int
    concurrency: tuple[int, ...]
    seed: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`overhead_p50_ms_at_8` is that of ingress and coordinator together; None if not measured."""

    start_to_first_token_s: float
    peak_rss_gib: float
    rss_gib_by_kind: dict[str, float]
    overhead_p50_ms_at_8: float | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    rows: list[Row]
    summary: Summary


def bench_serve(options: Options, say: Callable[[str], None]) -> Result:
    """Measure the deployment of a cluster file, on a Ray of our own. `say` tells the progress.

    Raises TdServeError, and nothing was left running.
    """
    with private_ray() as temp:
        data, config = read_cluster(options.cluster)
        name = config.frontend.served_model_name or config.model
        say(f"starting {options.cluster} with serve run")
        start = measure_start(data, name, temp, options.seed)
        say(f"first token after {start.start_to_first_token_s:.1f} s")
        rows = _measure_overhead(data["applications"][0], options, temp, say)
    return Result(rows=rows, summary=summarise(rows, start))


def read_cluster(path: Path) -> tuple[dict[str, Any], DeploymentConfig]:
    """A cluster file with td_serve's one application. Raises ConfigError, ModelError."""
    from td_serve.models.resolve import resolve
    from td_serve.serve.check import check_file

    configs = check_file(path).applications
    data: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    if len(configs) != 1 or len(data["applications"]) != 1:
        raise ConfigError(
            f"{path}: {len(data['applications'])} applications, {len(configs)} of them td_serve's; "
            "expected one, td_serve's"
        )
    if (prefix := data["applications"][0].get("route_prefix", "/")) != "/":
        raise ConfigError(f"{path}: applications[0].route_prefix: expected '/', got {prefix!r}")
    resolve(configs[0].model)
    return data, configs[0]


def summarise(rows: list[Row], start: Start) -> Summary:
    """The few numbers to remember."""
    at = next((row for row in rows if row.concurrency == AT), None)
    return Summary(
        start_to_first_token_s=start.start_to_first_token_s,
        peak_rss_gib=round(sum(start.rss_gib_by_kind.values()), 3),
        rss_gib_by_kind=start.rss_gib_by_kind,
        overhead_p50_ms_at_8=None if at is None else at.round_overhead_p50_ms,
    )


def _measure_overhead(
    app: dict[str, Any], options: Options, temp: Path, say: Callable[[str], None]
) -> list[Row]:
    from td_serve.models.random_model import write_random

    model = temp / "tiny"
    write_random(model, like="llama", layers=2, hidden=128, head_dim=32, intermediate=256)
    args = copy.deepcopy(app["args"])
    args["model"] = str(model)
    say("starting a tiny random model")
    name = app.get("name", "default")

    async def measure(base: str) -> list[Row]:
        from td_serve.bench.ways import Ways

        served = (args.get("frontend") or {}).get("served_model_name") or str(model)
        async with Ways(base, name, served, max(options.concurrency)) as ways:
            await ways.wait_until_ready(_READY_PATIENCE_S)
            return await measure_overhead(
                ways,
                Prompts(model, options.seed),
                options.requests,
                options.concurrency,
                say,
            )

    with deployed(args, name, temp) as base:
        return asyncio.run(measure(base))
