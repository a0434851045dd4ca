"""`td-serve bench serve`: its arithmetic, its gate, its report, and one tiny run of the whole."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from td_serve.bench.latency import COMPLETIONS, Row, Way, percentile, row, table, take_turns
from td_serve.bench.memory import KINDS, PeakMemory, kind_of
from td_serve.bench.overhead import PROMPT_TOKENS, Prompts, measure_overhead
from td_serve.bench.processes import descendants, ending_descendants
from td_serve.bench.serve import Summary, read_cluster, summarise
from td_serve.bench.start import Start
from td_serve.cli import EXIT_ERROR, main
from td_serve.errors import ConfigError, TdServeError
from td_serve.models.random_model import write_random
from tests.cluster.harness import BIN, LOCAL, ROOT, cluster_file, wait_for

ROW_KEYS = [
    "concurrency",
    "direct_p50_ms",
    "direct_p99_ms",
    "http_p50_ms",
    "http_p99_ms",
    "round_p50_ms",
    "round_p99_ms",
    "floor_p50_ms",
    "floor_p99_ms",
    "http_overhead_p50_ms",
    "http_overhead_p99_ms",
    "round_overhead_p50_ms",
    "round_overhead_p99_ms",
]
SUMMARY_KEYS = [
    "start_to_first_token_s",
    "peak_rss_gib",
    "rss_gib_by_kind",
    "overhead_p50_ms_at_8",
]


def a_row(concurrency: int) -> Row:
    return row(
        concurrency,
        {Way.DIRECT: [0.010], Way.HTTP: [0.014], Way.ROUND: [0.019], Way.FLOOR: [0.002]},
    )


class FakeWays:
    """Answers by itself; `wrong` gives another token than the others."""

    def __init__(self, wrong: Way | None = None, broken: Way | None = None) -> None:
        self.asked: list[tuple[Way, tuple[int, ...], str]] = []
        self.in_flight = self.most_in_flight = 0
        self._wrong, self._broken = wrong, broken

    async def ask(self, way: Way, prompt: list[int], salt: str, *, show: bool = False) -> Any:
        self.asked.append((way, tuple(prompt), salt))
        if way is self._broken and not show:
            raise TdServeError("a completion failed: 503")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return [sum(prompt) + (way is self._wrong)] if show else None


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    (tmp_path / "config.json").write_text('{"vocab_size": 5000}')
    return Prompts(tmp_path, 3)


# ---------------------------------------------------------------- arithmetic


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    import numpy as np

    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(st.integers(1, 2000), st.integers(1, 64))
def test_blocks_cover_every_request_once_and_take_turns(requests: int, concurrency: int) -> None:
    blocks = take_turns(requests, concurrency)
    covered = [place for block in blocks for place in range(block.start, block.stop)]
    assert covered == list(range(requests))
    assert all(set(block.order) == set(Way) for block in blocks)
    orders = [block.order for block in blocks]
    if len(blocks) > 1:
        assert len(blocks) % 2 == 0
        assert orders[0::2].count(orders[0]) == orders[1::2].count(orders[0][::-1])


def test_a_row_is_in_milliseconds_above_the_direct_way() -> None:
    made = msgspec.to_builtins(a_row(8))
    assert list(made) == ROW_KEYS
    assert (made["direct_p50_ms"], made["http_p99_ms"]) == (10.0, 14.0)
    assert (made["http_overhead_p50_ms"], made["round_overhead_p99_ms"]) == (4.0, 9.0)


def test_the_table_shows_every_row() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table([a_row(1), a_row(32)]))
    said = console.export_text()
    assert "32" in said
    assert said.count("10.0/10.0") == 2
    assert said.count("9.0/9.0") == 2


def test_the_summary_takes_the_round_at_eight() -> None:
    start = Start(start_to_first_token_s=3.0, rss_gib_by_kind={"engines": 2.0, "ray": 0.5})
    assert summarise([a_row(1), a_row(8)], start) == Summary(
        start_to_first_token_s=3.0,
        peak_rss_gib=2.5,
        rss_gib_by_kind={"engines": 2.0, "ray": 0.5},
        overhead_p50_ms_at_8=9.0,
    )
    assert summarise([a_row(1)], start).overhead_p50_ms_at_8 is None


# ---------------------------------------------------------------- measuring


async def test_every_way_gets_the_same_prompts_and_no_cached_one(prompts: Prompts) -> None:
    ways = FakeWays()
    rows = await measure_overhead(ways, prompts, 40, (1, 4), lambda line: None)  # type: ignore[arg-type]
    assert [one.concurrency for one in rows] == [1, 4]
    assert ways.most_in_flight == 4
    by_way = {way: sorted(p for w, p, _ in ways.asked if w is way) for way in Way}
    assert by_way[Way.DIRECT] == by_way[Way.HTTP] == by_way[Way.ROUND]
    assert len({(prompt, salt) for _, prompt, salt in ways.asked}) == len(ways.asked)
    assert len(set(by_way[Way.DIRECT])) == len(by_way[Way.DIRECT])


@pytest.mark.parametrize("wrong", COMPLETIONS)
async def test_nothing_is_measured_when_the_ways_disagree(wrong: Way, prompts: Prompts) -> None:
    ways = FakeWays(wrong=wrong)
    with pytest.raises(TdServeError, match=f"disagree.*{wrong.value}"):
        await measure_overhead(ways, prompts, 8, (1,), lambda line: None)  # type: ignore[arg-type]
    assert len(ways.asked) == len(COMPLETIONS)


async def test_a_request_that_fails_ends_the_measurement(prompts: Prompts) -> None:
    ways = FakeWays(broken=Way.ROUND)
    with pytest.raises(TdServeError, match="503"):
        await measure_overhead(ways, prompts, 8, (4,), lambda line: None)  # type: ignore[arg-type]


def test_prompts_are_the_seeds(prompts: Prompts, tmp_path: Path) -> None:
    taken = prompts.take(3)
    assert taken == Prompts(tmp_path, 3).take(3)
    assert taken != Prompts(tmp_path, 4).take(3)
    assert all(len(prompt) == PROMPT_TOKENS for prompt in taken)
    assert max(max(prompt) for prompt in taken) < 5000


# ---------------------------------------------------------------- processes and memory


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::ServeReplica:td_serve:Ingress", "ingress"),
        ("ray::ServeReplica:td_serve:RoundCoordinator.play", "coordinator"),
        ("ray::ServeReplica:td_serve:PrefillReplica.prefill", "prefill"),
        ("ray::ServeReplica:td_serve:DecodeReplica", "decode"),
        ("ray::ServeReplica:td_serve:KVDirectory", "directory"),
        ("VLLM::EngineCore", "engines"),
        ("ray::ProxyActor", "ray"),
        ("/x/raylet --raylet_socket_name=/tmp/y", "ray"),
    ],
)
def test_processes_are_told_by_their_titles(title: str, kind: str) -> None:
    assert kind_of(title) == kind


def test_the_peak_is_kept_after_the_memory_is_gone() -> None:
    grower = "x = bytearray(200 * 2**20); print('full', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grower], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with PeakMemory(lambda: [psutil.Process(process.pid)]) as memory:
                pass
        finally:
            process.kill()
    assert list(memory.gib()) == list(KINDS)
    assert 0.19 < memory.gib()["ray"] < 0.4


def test_orphans_are_ended_too() -> None:
    """A child whose own parent has ended does not get away, whatever ends the block."""
    breed = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c',"
        "'import time; time.sleep(600)'], start_new_session=True, stdout=2).pid)"
    )
    with contextlib.suppress(KeyboardInterrupt), ending_descendants():
        done = subprocess.run(
            [sys.executable, "-c", breed], stdout=subprocess.PIPE, text=True, check=True
        )
        orphan = int(done.stdout)
        assert orphan in [one.pid for one in descendants()]
        raise KeyboardInterrupt
    assert not psutil.pid_exists(orphan)


# ---------------------------------------------------------------- the command


def test_a_cluster_file_of_two_applications_is_refused(tmp_path: Path) -> None:
    import yaml

    data = yaml.safe_load(LOCAL.read_text("utf-8"))
    data["applications"].append({**data["applications"][0], "name": "other", "route_prefix": "/o"})
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(data), "utf-8")
    with pytest.raises(ConfigError, match="2 applications"):
        read_cluster(path)


@pytest.mark.parametrize("wrong", ["0", "1,,8", "1,x", ""])
def test_wrong_numbers_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", "--concurrency", wrong])
    assert stopped.value.code == EXIT_ERROR
    assert "--concurrency" in capsys.readouterr().err


def run_bench(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / "td-serve"), "bench", "serve", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_wrong_file_is_told_in_one_line(tmp_path: Path) -> None:
    process = run_bench("--cluster", str(tmp_path / "none.yaml"))
    _, said = process.communicate(timeout=120)
    assert process.returncode == EXIT_ERROR
    assert said.splitlines()[-1].startswith("td-serve: error: ")
    assert "none.yaml: No such file" in said


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_whole_in_small(tmp_path: Path) -> None:
    write_random(tmp_path / "tiny", like="llama", layers=2)
    cluster = tmp_path / "tiny.yaml"
    engine = {"max_model_len": 1024, "kv_cache_gib": 0.1}
    data = cluster_file(model=str(tmp_path / "tiny"), engine=engine)
    cluster.write_text(yaml.safe_dump(data), "utf-8")
    out = tmp_path / "bench.json"
    process = run_bench(
        f"--cluster={cluster}", "--requests=4", "--concurrency=1,2", "--seed=5", f"--json={out}"
    )
    printed, said = process.communicate(timeout=800)
    assert process.returncode == 0, said
    assert "http − direct" in printed
    made = json.loads(out.read_text("utf-8"))
    assert list(made) == ["command", "versions", "machine", "seed", "rows", "summary"]
    assert made["command"][:3] == ["td-serve", "bench", "serve"]
    assert made["seed"] == 5
    assert [list(one) for one in made["rows"]] == [ROW_KEYS, ROW_KEYS]
    assert [one["concurrency"] for one in made["rows"]] == [1, 2]
    assert list(made["summary"]) == SUMMARY_KEYS
    assert list(made["summary"]["rss_gib_by_kind"]) == list(KINDS)
    assert made["summary"]["rss_gib_by_kind"]["engines"] > 0.5


@pytest.mark.cluster
def test_an_interrupt_leaves_nothing_running() -> None:
    process = run_bench("--requests=4")
    bench = psutil.Process(process.pid)

    def has_ray() -> bool:
        assert process.poll() is None
        return any("raylet" in _title(one) for one in bench.children(recursive=True))

    wait_for(has_ray, 120, "a Ray of its own")
    started = bench.children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=150)
    assert process.returncode == 130
    assert not [one for one in started if one.is_running()]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
