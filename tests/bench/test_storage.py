"""The storage bench: on a real engine what is kept adds up, lossless where it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from td_serve.cli import EXIT_ERROR, main
from td_serve.models.random_model import write_random

VILLAGE = Path(__file__).parents[2] / "examples" / "village.jsonl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codecs", "lossless,int7"], "--codecs: 'int7', expected lossless, int8 or int4, with"),
        (["--codecs", "int8+int4"], "--codecs: 'int8+int4', expected"),
        (["--rounds", "99"], "round 99: trace 'village' has rounds 0 to 5"),
        (["--agents", "1"], "--agents: 1, expected 2 or more"),
        (["--json", "/no/such/folder/out.json"], "/no/such/folder is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "storage", "--trace", str(VILLAGE), *arguments]) == EXIT_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.engine
def test_on_a_real_engine_what_is_kept_adds_up(tmp_path: Path) -> None:
    out, picture, model = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "tiny"
    write_random(model, like="llama", layers=3, kv_heads=2, head_dim=64)
    command = ["bench", "storage", "--model", str(model), "--trace", str(VILLAGE)]
    command += ["--rounds", "3", "--presets", "first_k,none", "--window", "4096"]
    command += ["--codecs", "int8,int4+int8", "--plot", str(picture)]  # lossless, too
    program = Path(sys.executable).with_name("td-serve")
    subprocess.run([program, *command, "--json", out], check=True, timeout=300)
    report = json.loads(out.read_text("utf-8"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {
        (row["preset"], row["diffs_by"], row["private_by"], row["round"]): row
        for row in report["rows"]
    }
    assert len(rows) == 2 * 3 * 3
    for (preset, diffs, private, number), row in rows.items():
        own = row["references"] + row["diffs"] + row["private"] + row["index"]
        assert row["mirror_ratio"] == pytest.approx(row["dense"] / own, rel=1e-3)
        assert row["group_ratio"] == pytest.approx(row["dense"] / (own + row["master"]), rel=1e-3)
        assert row["lossless"] == (
            (diffs, private) == ("lossless", "lossless")
            or (preset == "none" and private == "lossless")
        )
        if diffs == private == "lossless":
            assert row["mirror_ratio"] <= row["bound_mirror"]
            assert row["group_ratio"] <= row["bound_group"]
            if preset == "none":
                # All but what says which tokens those are.
                assert row["mirror_ratio"] == pytest.approx(row["bound_mirror"], rel=0.03)
        if number == 3:
            assert row["added_kl"] >= 0
            assert (row["added_kl"] == 0) == row["lossless"]
    whole = rows["first_k", "lossless", "lossless", 3]
    assert rows["first_k", "int8", "lossless", 3]["diffs"] < whole["diffs"] / 3
    assert rows["first_k", "int4", "int8", 3]["private"] < whole["private"] / 2
    assert whole["blocks_changed_mean"] > 0
    assert rows["none", "lossless", "lossless", 3]["blocks_changed_mean"] == 0
    summary = report["summary"]
    assert summary["lossless"]
    assert summary["mirror_ratio"] == whole["mirror_ratio"]
    assert 0 < summary["group_of_bound"] < 1
