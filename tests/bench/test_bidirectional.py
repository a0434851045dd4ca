"""The bidirectional bench: its numbers are medians of samples; on real engines they add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from td_serve.bench.bidirectional import Load, row, summarise
from td_serve.bench.turns import LEAST_PROMPT, Sample, Scenario
from td_serve.cli import EXIT_ERROR, main
from td_serve.models.random_model import write_random

KEYS = {
    "prompt_tokens",
    "ttft_on_ms",
    "ttft_off_ms",
    "transfer_ms",
    "recompute_on_ms",
    "recompute_off_ms",
    "decode_on_ms",
    "decode_off_ms",
    "bytes",
    "speedup",
}

LOAD = Load(in_flight=8, decode_on_ms=1.0, decode_off_ms=1.0)


def sample(ttft: float, prefill: float, transfer: float = 0.0, size: int = 0) -> Sample:
    return Sample(
        ttft=ttft, prefill=prefill, transfer=transfer, decode=0.01, bytes=size, reply=(1, 2)
    )


def test_a_row_holds_medians_and_divides_prefill_into_its_parts() -> None:
    made = row(
        512,
        [sample(0.2, 0.1, 0.03, 700), sample(9.0, 0.1, 0.03, 700), sample(0.1, 0.1, 0.03, 700)],
        [sample(0.5, 0.4), sample(0.6, 0.4), sample(0.4, 0.4)],
    )
    assert (made.ttft_on_ms, made.ttft_off_ms, made.speedup) == (200.0, 500.0, 2.5)
    assert (made.recompute_on_ms, made.transfer_ms, made.recompute_off_ms) == (70.0, 30.0, 400.0)
    assert made.bytes == 700


def test_the_summary_compares_growth() -> None:
    rows = [row(512, [sample(0.2, 0.1)], [sample(0.5, 0.4)])]
    rows.append(row(4096, [sample(0.4, 0.1)], [sample(4.5, 0.4)]))
    made = summarise(rows, Scenario.EVICTED, 0.25, LOAD)
    assert (made.speedup_max, made.growth_ratio) == (11.25, 0.05)
    assert summarise(rows[:1], Scenario.NO_CACHE, 0.0, LOAD).growth_ratio is None


def test_a_prompt_that_cannot_hold_two_turns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "bidirectional", "--prompt-tokens", str(LEAST_PROMPT - 1)]
    assert main(command) == EXIT_ERROR
    assert f"--prompt-tokens: 48, expected at least {LEAST_PROMPT}" in capsys.readouterr().err


@pytest.mark.engine
def test_on_real_engines_a_turn_is_read_back_and_answers_the_same(tmp_path: Path) -> None:
    """The bench itself compares both ways' answers. What was read is nearly all of the prompt."""
    out, picture, model = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "tiny"
    write_random(model, like="llama", layers=2, kv_heads=2, head_dim=64)
    command = ["bench", "bidirectional", "--model", str(model), "--prompt-tokens", "256"]
    command += [
        "--repeats",
        "1",
        "--in-flight",
        "4",
        "--evicted",
        "--json",
        str(out),
        "--plot",
        str(picture),
    ]
    assert main(command) == 0
    report = json.loads(out.read_text("utf-8"))
    (found,) = report["rows"]
    assert set(found) == KEYS
    assert report["summary"]["scenario"] == "evicted"
    # 208 tokens and a reply of 16, the last of which was never fed back: 7 blocks of 32.
    assert found["bytes"] == 7 * 32 * 2 * 2 * 2 * 64 * 4
    assert report["summary"]["retained_pool_share"] > 0
    assert report["summary"]["load"]["in_flight"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
