"""The numbers of a replay: they add up, and unknown stays unknown."""

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from td_serve.sim.layouts import Kind, Layout
from td_serve.sim.member import CutReport, Dropped, MemberResult
from td_serve.sim.replay import ReplayResult, RoundResult, Setup
from td_serve.sim.report import describe_cut, percentile, report, row, summary, table
from td_serve.types import AgentId, SessionId

SETUP = Setup(
    trace="village",
    sim=SessionId("s"),
    model="m",
    layout=Layout.TRANSCRIPT,
    live=False,
    agents=(AgentId("Marta"), AgentId("Osk"), AgentId("Pell")),
    rounds=(0, 1),
    window=100,
    counting="a counter",
    counting_exact=True,
)


def member(agent: str, ttft_ms: float, cached: int | None = 32) -> MemberResult:
    """A request answered with 11 tokens, 100 ms after its first text."""
    return MemberResult(
        agent=AgentId(agent),
        round=1,
        ttft_ms=ttft_ms,
        latency_ms=ttft_ms + 100,
        prompt_tokens=50,
        cached_tokens=cached,
        completion_tokens=11,
        decode_tok_s=100.0,
        finish_reason="stop",
        text="a storm",
    )


FAILED = MemberResult(agent=AgentId("Pell"), round=1, latency_ms=5.0, error="503: no replica")
CUT = CutReport(
    120, 90, (Dropped(Kind.HISTORY, 0, AgentId("Osk")), Dropped(Kind.SHARED, 1, AgentId("Pell")))
)


def played(*members: MemberResult) -> RoundResult:
    return RoundResult(round=1, label="noon", wall_s=0.3, members=members)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    within = sum(value <= found for value in values if found is not None)
    assert within >= percent / 100 * len(values) * (1 - 1e-9)


def test_no_values_have_no_percentile() -> None:
    assert percentile([], 50) is None


def test_a_round_adds_up_over_the_members_that_succeeded() -> None:
    made = row(played(member("Marta", 100), member("Osk", 200, cached=10), FAILED))
    assert (made.agents, made.failures) == (3, 1)
    assert (made.prompt_tokens, made.reused_tokens, made.computed_tokens) == (100, 42, 58)
    assert made.completion_tokens == 22
    assert (made.ttft_ms_p50, made.ttft_ms_p99) == (100, 200)
    assert made.decode_tok_s_agent == 100.0
    assert made.decode_tok_s_total == pytest.approx(22 / 0.2)  # from 100 ms to 300 ms


def test_reuse_is_unknown_unless_the_server_says_it_of_every_prompt() -> None:
    made = row(played(member("Marta", 100), member("Osk", 200, cached=None)))
    assert made.reused_tokens is None
    assert made.computed_tokens is None
    assert row(played(FAILED)).reused_tokens is None


def test_texts_are_left_out_unless_asked_for() -> None:
    round_ = played(member("Marta", 100))
    assert row(round_).members[0].text is None
    assert row(round_, texts=True).members[0].text == "a storm"


def test_a_cut_is_counted_and_described() -> None:
    cut = msgspec.structs.replace(member("Osk", 200), cut=CUT)
    assert row(played(cut)).cut == 1
    assert describe_cut(cut) == (
        "round 1, Osk: cut from 120 to 90 tokens: "
        "left out 1 history of rounds 0–0, 1 shared of rounds 1–1"
    )
    assert describe_cut(FAILED) == ""


def test_the_summary_covers_all_rounds() -> None:
    result = ReplayResult(
        setup=SETUP, rounds=(played(member("Marta", 100)), played(member("Marta", 300), FAILED))
    )
    made = summary(result)
    assert (made.rounds, made.requests, made.failures) == (2, 3, 1)
    assert (made.prompt_tokens, made.reused_tokens) == (100, 64)
    assert made.wall_s == pytest.approx(0.6)
    assert (made.ttft_ms_p50, made.ttft_ms_p99) == (100, 300)
    assert set(report(result)) == {"rows", "summary"}


def test_the_table_has_a_line_per_round_and_marks_unfinished_ones() -> None:
    unfinished = msgspec.structs.replace(played(FAILED), complete=False)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(ReplayResult(setup=SETUP, rounds=(played(), unfinished))))
    text = console.export_text()
    assert "1 (cut off)" in text
    assert "reused" in text
    assert "–" in text
