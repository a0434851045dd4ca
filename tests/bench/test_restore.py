"""The restore bench: on a real engine all ways write the same, whatever model it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from td_serve.cli import EXIT_ERROR, main
from td_serve.models.random_model import write_random

VILLAGE = Path(__file__).parents[2] / "examples" / "village.jsonl"


def test_a_trace_without_that_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "restore", "--trace", str(VILLAGE), "--round", "9"]
    assert main(command) == EXIT_ERROR
    assert "round 9: trace 'village' has rounds 0 to 5" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.parametrize(("like", "layout"), [("llama", "transcript"), ("qwen3", "history_first")])
def test_all_ways_bring_the_same_into_the_pages(tmp_path: Path, like: str, layout: str) -> None:
    """Or the bench gives no time. In a transcript there are histories, and rows of two passes."""
    out, model = tmp_path / "out.json", tmp_path / "tiny"
    write_random(model, like=like, layers=2, kv_heads=2, head_dim=64)
    command = ["bench", "restore", "--model", str(model), "--trace", str(VILLAGE)]
    command += ["--agents", "2,4", "--round", "3", "--preset", "first_k", "--layout", layout]
    command += ["--window", "4096", "--repeats", "2", "--below", f"fs://{tmp_path}/tier"]
    program = Path(sys.executable).with_name("td-serve")
    subprocess.run([program, *command, "--json", out], check=True, timeout=300)
    report = json.loads(out.read_text("utf-8"))
    found = {(row["agents"], row["way"]): row for row in report["rows"]}
    ways = ("fused", "written", "dense", "below", "recomputed")
    assert set(found) == {(agents, way) for agents in (2, 4) for way in ways}
    most = {way: found[4, way]["ms"] for way in ways}
    summary = report["summary"]
    ours = min(most["fused"], most["written"])
    assert summary["restore_speedup_vs_dense"] == pytest.approx(most["dense"] / ours, rel=0.01)
    below = most["recomputed"] / most["below"]
    assert summary["below_vs_recompute"] == pytest.approx(below, rel=0.01)
    assert summary["restore_vs_recompute"] == pytest.approx(most["recomputed"] / ours, rel=0.01)
