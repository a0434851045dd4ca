"""Replays against a real deployment: what is sent, fed back, cut, counted and told.

`deployment_url` is the endpoint's /v1 address, `deployment_model_dir` the served model's directory.
"""

import argparse
import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from td_serve.cli.replay import EXIT_FAILURES, add_parser
from td_serve.errors import ReplayError
from td_serve.sim.layouts import Layout, build
from td_serve.sim.member import MemberResult, connect
from td_serve.sim.replay import ReplayConfig, ReplayResult, RoundResult, Setup, replay
from td_serve.sim.tokens import ModelTokenizer
from td_serve.sim.trace import Trace
from td_serve.sim.workload import choose_agents, recorded_outputs, share, views

pytestmark = pytest.mark.cluster

VILLAGE = Path(__file__).parents[2] / "examples" / "village.jsonl"


async def play(url: str, config: ReplayConfig) -> ReplayResult:
    async with connect(url) as client:
        return await replay(config, client)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
async def test_each_round_is_played_by_all_agents_and_counted_as_the_server_counts(
    layout: Layout, village: Trace, deployment_url: str, deployment_model_dir: Path
) -> None:
    config = ReplayConfig(
        trace=village, rounds=3, layout=layout, max_tokens=8, tokenizer=deployment_model_dir
    )
    result = await play(deployment_url, config)
    assert result.failures == 0
    assert result.stopped is None
    assert [r.round for r in result.rounds] == [0, 1, 2]
    counter = ModelTokenizer(deployment_model_dir)
    chosen = choose_agents(village, None)
    shared = [share(r, recorded_outputs(r), chosen) for r in village.rounds]
    for round_, played in zip(village.rounds[:3], result.rounds, strict=True):
        assert [m.agent for m in played.members] == list(chosen)
        for view, member in zip(
            views(village, round_, chosen, shared), played.members, strict=True
        ):
            assert member.prompt_tokens == counter.chat(build(layout, view).chat())
            assert member.completion_tokens is not None
            assert 1 <= member.completion_tokens <= 8
            assert member.finish_reason in ("stop", "length")
            assert member.ttft_ms is not None
            assert member.latency_ms is not None
            assert 0 < member.ttft_ms <= member.latency_ms
            assert member.cut is None


async def test_live_outputs_are_what_the_next_round_reads(
    village: Trace, deployment_url: str, deployment_model_dir: Path
) -> None:
    config = ReplayConfig(
        trace=village, agents=2, rounds=2, live=True, max_tokens=8, tokenizer=deployment_model_dir
    )
    result = await play(deployment_url, config)
    assert result.failures == 0
    written = {m.agent: m.text or "" for m in result.rounds[0].members}
    shared = share(village.rounds[0], written, choose_agents(village, 2))
    assert [block.text for block in shared.blocks] == [
        written[agent] for agent in village.rounds[0].order if agent in written
    ]
    counter = ModelTokenizer(deployment_model_dir)
    made = views(village, village.rounds[1], choose_agents(village, 2), [shared])
    for view, member in zip(made, result.rounds[1].members, strict=True):
        prompt = build(Layout.HISTORY_FIRST, view)
        assert member.prompt_tokens == counter.chat(prompt.chat())


async def test_greedy_replays_write_the_same_with_and_without_rounds(
    village: Trace, deployment_url: str
) -> None:
    texts = []
    for as_round in (True, False):
        config = ReplayConfig(trace=village, rounds=2, max_tokens=8, as_round=as_round)
        result = await play(deployment_url, config)
        assert result.failures == 0
        texts.append([m.text for r in result.rounds for m in r.members])
    assert texts[0] == texts[1]


async def test_a_prompt_over_the_window_is_cut_and_told(
    village: Trace, deployment_url: str, deployment_model_dir: Path
) -> None:
    config = ReplayConfig(
        trace=village,
        first_round=5,
        layout=Layout.TRANSCRIPT,
        max_tokens=8,
        window=500,
        tokenizer=deployment_model_dir,
    )
    result = await play(deployment_url, config)
    assert result.failures == 0
    for member in result.rounds[0].members:
        assert member.cut is not None
        assert member.cut.tokens_before > 500
        assert member.prompt_tokens == member.cut.tokens <= 500 - 8
        assert member.cut.dropped


async def test_members_that_cannot_fit_are_refused_and_the_round_goes_on_without_them(
    village: Trace, deployment_url: str, deployment_model_dir: Path
) -> None:
    counter = ModelTokenizer(deployment_model_dir)
    made = views(village, village.rounds[0], choose_agents(village, None), [])
    bare = [msgspec.structs.replace(view, history=()) for view in made]
    sizes = sorted(counter.chat(build(Layout.HISTORY_FIRST, view).chat()) for view in bare)
    config = ReplayConfig(
        trace=village,
        rounds=1,
        max_tokens=1,
        window=sizes[1] + 1,
        tokenizer=deployment_model_dir,
    )
    members = (await play(deployment_url, config)).rounds[0].members
    refused = [m for m in members if m.error is not None]
    assert 1 <= len(refused) <= 2
    assert all("beside 1 for the output" in (m.error or "") for m in refused)
    assert all(m.completion_tokens == 1 for m in members if m.error is None)


async def test_a_round_in_which_all_fail_ends_the_replay(
    village: Trace, deployment_url: str
) -> None:
    # A window the server does not have: it refuses what the client no longer cuts.
    config = ReplayConfig(trace=village, max_tokens=10**6, window=10**7, live=True)
    result = await play(deployment_url, config)
    assert result.stopped == "no request of round 0 succeeded"
    assert len(result.rounds) == 1
    assert result.failures == 4
    assert all((m.error or "").startswith("400: ") for m in result.rounds[0].members)


async def test_an_unknown_model_is_refused_by_name(village: Trace, deployment_url: str) -> None:
    with pytest.raises(ReplayError, match=r"does not serve 'other': it serves \["):
        await play(deployment_url, ReplayConfig(trace=village, model="other"))


async def test_cancelling_ends_all_requests_and_tells_the_unfinished_round(
    village: Trace, deployment_url: str
) -> None:
    ended: list[MemberResult] = []
    rounds: list[RoundResult] = []
    config = ReplayConfig(trace=village, live=True, max_tokens=512, rounds=2)

    def cancel_soon(_: Setup) -> None:
        asyncio.get_running_loop().call_later(1, task.cancel)

    async with connect(deployment_url) as client:
        task = asyncio.create_task(
            replay(
                config,
                client,
                on_start=cancel_soon,
                on_member=ended.append,
                on_round=rounds.append,
            )
        )
        with pytest.raises(asyncio.CancelledError):
            await task
        # The endpoint is free again: nothing of the cancelled round is in the way.
        again = await replay(ReplayConfig(trace=village, rounds=1, max_tokens=1), client)
    assert again.failures == 0
    assert not rounds[-1].complete
    assert [m for r in rounds for m in r.members] == ended


def test_the_command_writes_a_report_whose_tokens_add_up(
    deployment_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    words = [str(VILLAGE), "--url", deployment_url, "--rounds", "2", "--max-tokens", "4"]
    assert run(*words, "--json", str(out), "--texts") == 0
    report = json.loads(out.read_text())
    assert set(report) == {"command", "versions", "machine", "seed", "rows", "summary"}
    assert [row["round"] for row in report["rows"]] == [0, 1]
    for row in report["rows"]:
        assert len(row["members"]) == row["agents"] == 4
        assert row["prompt_tokens"] == sum(m["prompt_tokens"] for m in row["members"])
        if row["reused_tokens"] is not None:
            assert row["computed_tokens"] + row["reused_tokens"] == row["prompt_tokens"]
        assert all(m["text"] for m in row["members"])
    total = sum(row["completion_tokens"] for row in report["rows"])
    assert report["summary"]["completion_tokens"] == total
    assert report["summary"]["failures"] == 0
    assert "village" in capsys.readouterr().out


def test_the_command_fails_when_a_request_does(
    deployment_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(VILLAGE), "--url", deployment_url, "--rounds", "1", "--window", "20"]
    assert run(*words, "--max-tokens", "1") == EXIT_FAILURES
    told = capsys.readouterr()
    assert "round 0, Marta: failed: the prompt of 'Marta'" in told.err
    assert "stopped: no request of round 0 succeeded" in told.out


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["replay", *words])
    code: int = args.func(args)
    return code
