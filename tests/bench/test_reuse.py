"""The reuse bench: its summary compares sums; on a real engine its gates hold and tokens add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from td_serve.bench.fidelity import Measured, fidelity
from td_serve.bench.presets import Preset
from td_serve.bench.reuse_rows import VLLM, Row, serial, summarise
from td_serve.cli import EXIT_ERROR, main
from td_serve.models.random_model import write_random

VILLAGE = Path(__file__).parents[2] / "examples" / "village.jsonl"


def row(way: str, seconds: float, computed: int) -> Row:
    return Row(round=1, way=way, seconds=seconds, suffix_s=seconds, computed=computed)


def test_the_summary_compares_the_first_preset_with_every_other_way() -> None:
    rows = [
        row(VLLM, 20.0, 1000),
        row("td", 5.0, 200),
        row("shared_first", 10.0, 500),
        row("td ahead", 2.5, 100),
        row("serial paper", 30.0, 500),
        row(serial(Preset.TD), 7.5, 260),
        row(VLLM, 20.0, 1000),
        row("td", 5.0, 200),
    ]
    near = Measured(kl=[[0.1, 0.5], [0.1, 0.5]], same=[[1.0, 0.8]] * 2, chosen=[0.5], match=[1, 2])
    far = Measured(kl=[[9.0, 9.0]], same=[[0.0, 0.0]], chosen=[0.5])
    close = [fidelity(Preset.TD, True, far), fidelity(Preset.TD, False, near)]
    summary = summarise(Preset.TD, rows, close, [])
    assert summary.speedup_vs_vllm == 4.0
    assert summary.speedup_vs_vllm_ahead == 16.0
    assert summary.speedup_vs_serial == 0.75
    assert summary.speedup_vs_serial_paper == 3.0
    assert summary.speedup_vs_shared_first == 1.0
    assert summary.over_floor == 1.25  # 400 tokens at 20 ms each are 8 s
    assert (summary.kl0_mean, summary.top1_32) == (0.1, 0.9)


def test_what_was_not_measured_is_not_claimed() -> None:
    summary = summarise(Preset.TD, [], [], [])
    assert summary.speedup_vs_vllm is None
    assert summary.kl0_mean is None


def test_an_unknown_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reuse", "--trace", str(VILLAGE), "--presets", "tdx"]) == EXIT_ERROR
    assert (
        "--presets: 'tdx', expected some of td, none, first_k, first_pages, hkvd"
        in capsys.readouterr().err
    )


@pytest.mark.engine
def test_on_a_real_engine_rounds_are_exact_where_they_must_be(tmp_path: Path) -> None:
    out, picture, model = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "tiny"
    write_random(model, like="llama", layers=3, kv_heads=2, head_dim=64)
    command = ["bench", "reuse", "--model", str(model), "--trace", str(VILLAGE)]
    command += ["--first", "2", "--presets", "first_k,td,hkvd,author,paper,none,full", "--fidelity"]
    command += ["--plot", str(picture)]
    # A process of its own: an engine that ends in this one would take the others along.
    program = Path(sys.executable).with_name("td-serve")
    subprocess.run([program, *command, "--json", out], check=True, timeout=300)
    report = json.loads(out.read_text("utf-8"))
    ways = {one["way"] for one in report["rows"]["speed"]}
    presets = {"first_k", "td", "hkvd", "author", "paper", "none", "full"}
    assert ways == {
        "vllm",
        "shared_first",
        *presets,
        "first_k ahead",
        "serial first_k",
        "serial paper",
    }
    assert picture.read_bytes().startswith(b"\x89PNG")
    computed = {row["way"]: row["computed"] for row in report["rows"]["speed"]}
    assert computed["paper"] < computed["none"], "what was said is there already"
    (chosen,) = (row for row in report["rows"]["speed"] if row["way"] == "td")
    assert chosen["blended"] == 0, "random weights: nearly everything deviates"
    for row in report["rows"]["speed"]:
        phases = sum(row[f"{name}_s"] for name in ("canonical", "choice", "rows", "restore"))
        assert (phases > 0) == (row["way"] not in ("vllm", "shared_first"))
        assert phases + row["suffix_s"] == pytest.approx(row["seconds"], abs=0.01)
    found = report["rows"]["fidelity"]
    by_preset = {one["preset"]: one for one in found if not one["at_random"]}
    assert {one["preset"] for one in found if one["at_random"]} == {
        "first_k",
        "td",
        "hkvd",
        "author",
        "paper",
    }
    assert by_preset["td"]["alone"] > 0
    assert by_preset["td"]["chosen"] == 1.0
    assert by_preset["td"]["kl0_max"] == 0.0
    assert by_preset["hkvd"]["chosen"] == pytest.approx(0.15, abs=0.02)
    assert by_preset["paper"]["chosen"] == pytest.approx(0.15, abs=0.02)
    assert by_preset["full"]["match_32_min"] == 32
    assert by_preset["full"]["kl0_max"] <= 1e-6
    assert by_preset["full"]["top1_32"] == 1.0
    assert by_preset["none"]["kl0_mean"] > by_preset["full"]["kl0_mean"]
    tokens = report["summary"]["tokens"]
    assert tokens["reused"] > 0
    assert tokens["prompt"] == sum(tokens[name] for name in ("local", "reused", "selected", "new"))


@pytest.mark.engine
def test_a_transcript_goes_on_from_what_earlier_rounds_have_left(tmp_path: Path) -> None:
    """Round 3: the outputs of three rounds, between which everybody has entries of their own."""
    out, model = tmp_path / "out.json", tmp_path / "tiny"
    write_random(model, like="llama", layers=3, kv_heads=2, head_dim=64)
    command = ["bench", "reuse", "--model", str(model), "--trace", str(VILLAGE)]
    command += ["--first", "3", "--past", "2", "--presets", "first_k,full", "--fidelity"]
    command += ["--layout", "transcript", "--window", "4096"]
    program = Path(sys.executable).with_name("td-serve")
    subprocess.run([program, *command, "--json", out], check=True, timeout=300)
    report = json.loads(out.read_text("utf-8"))
    (row,) = [one for one in report["rows"]["speed"] if one["way"] == "first_k"]
    assert row["blended"] > 1
    tokens = report["summary"]["tokens"]
    assert tokens["local"] > tokens["reused"] > 0, "all but the last round is there already"
    found = {one["preset"]: one for one in report["rows"]["fidelity"] if not one["at_random"]}
    assert found["full"]["kl32_max"] <= 1e-6
    assert found["first_k"]["kl32_mean"] > 1e-4, "histories that were blended count, too"


def test_more_rounds_before_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "reuse", "--trace", str(VILLAGE), "--first", "2", "--past", "3"]
    assert main(command) == EXIT_ERROR
    assert "--past: 3, expected at most 2" in capsys.readouterr().err


def test_a_layout_with_nothing_to_blend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "reuse", "--trace", str(VILLAGE), "--layout", "shared_first"]
    assert main(command) == EXIT_ERROR
    said = capsys.readouterr().err
    assert "--layout: 'shared_first', expected history_first or transcript" in said
