"""The layouts: same parts, stated order, shared blocks verbatim and in one order for all."""

from pathlib import Path

import pytest
from hypothesis import given

from td_serve.sim.layouts import JOIN, Kind, Layout, Prompt, build
from td_serve.sim.trace import Trace, read_trace
from td_serve.sim.workload import View, choose_agents, recorded_outputs, share, views
from tests.sim.strategies import all_views, traces

RECORDED = sorted((Path(__file__).parents[3] / "shared" / "traces").glob("*.jsonl.gz"))
layouts = pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)


def kinds(prompt: Prompt) -> list[Kind]:
    return [part.kind for part in prompt.parts]


def prompts(trace: Trace, layout: Layout, round_: int, agents: int | None = None) -> list[Prompt]:
    chosen = choose_agents(trace, agents)
    shared = [share(r, recorded_outputs(r), chosen) for r in trace.rounds[:round_]]
    return [build(layout, v) for v in views(trace, trace.rounds[round_], chosen, shared)]


@layouts
@given(view=all_views())
def test_a_prompt_is_its_parts_joined_by_one_blank_line(layout: Layout, view: View) -> None:
    prompt = build(layout, view)
    assert prompt.chat() == [
        {"role": message.role, "content": JOIN.join(part.text for part in message.parts)}
        for message in prompt.messages
    ]
    assert all(part.text.strip() for part in prompt.parts)
    assert all(message.parts for message in prompt.messages)
    assert [message.role for message in prompt.messages] in (["system", "user"], ["user"])


@layouts
@given(view=all_views())
def test_nothing_is_lost_and_shared_blocks_stay_verbatim(layout: Layout, view: View) -> None:
    parts = build(layout, view).parts
    rounds = view.shared if layout is Layout.TRANSCRIPT else view.shared[-1:]
    expected = [(b.speaker, b.text) for shared in rounds for b in shared.blocks]
    assert [(p.agent, p.text) for p in parts if p.kind is Kind.SHARED] == expected
    history = [(entry.round, entry.text.strip("\r\n")) for entry in view.history]
    assert [(p.round, p.text) for p in parts if p.kind is Kind.HISTORY] == history
    assert [p.text for p in parts if p.kind is Kind.PROFILE] == [view.profile.strip("\r\n")]
    assert parts[-1].kind is Kind.TASK
    assert parts[-1].text == view.task.strip("\r\n")


@given(all_views())
def test_history_first_has_the_shared_blocks_right_before_the_task(view: View) -> None:
    order = kinds(build(Layout.HISTORY_FIRST, view))
    rank = [Kind.PREAMBLE, Kind.PROFILE, Kind.HISTORY, Kind.SHARED, Kind.TASK]
    assert order == sorted(order, key=rank.index)


@given(traces())
def test_shared_first_begins_the_same_for_all_agents(trace: Trace) -> None:
    for round_ in range(len(trace.rounds)):
        made = prompts(trace, Layout.SHARED_FIRST, round_)
        common = (Kind.NEUTRAL, Kind.PREAMBLE, Kind.SHARED)
        heads = []
        for prompt in made:
            order = kinds(prompt)
            shared = [kind for kind in order if kind in common]
            assert order[: len(shared)] == shared
            heads.append([part.text for part in prompt.parts[: len(shared)]])
        assert all(head == heads[0] for head in heads)


@given(all_views())
def test_a_transcript_prompt_begins_with_the_last_one_up_to_its_task(view: View) -> None:
    if view.round == 0:
        return
    before = View(
        agent=view.agent,
        round=view.round - 1,
        preamble=view.preamble,
        profile=view.profile,
        history=tuple(entry for entry in view.history if entry.round < view.round),
        shared=view.shared[:-1],
        task=view.task,
    )
    now, then = build(Layout.TRANSCRIPT, view), build(Layout.TRANSCRIPT, before)
    assert now.parts[: len(then.parts) - 1] == then.parts[:-1]


@layouts
@given(trace=traces())
def test_all_agents_have_the_shared_blocks_in_one_order(layout: Layout, trace: Trace) -> None:
    for round_ in range(len(trace.rounds)):
        orders = [
            [(p.round, p.agent, p.text) for p in prompt.parts if p.kind is Kind.SHARED]
            for prompt in prompts(trace, layout, round_)
        ]
        assert all(order == orders[0] for order in orders)


def test_round_zero_has_no_shared_blocks(village: Trace) -> None:
    for layout in Layout:
        assert Kind.SHARED not in kinds(prompts(village, layout, 0)[0])


@layouts
def test_the_village_reads_its_neighbours_in_the_order_they_spoke(
    layout: Layout, village: Trace
) -> None:
    for prompt in prompts(village, layout, 1, agents=3):
        said = [part.agent for part in prompt.parts if part.kind is Kind.SHARED]
        assert said == ["Marta", "Ines", "Osk"]


@layouts
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_traces_are_laid_out(path: Path, layout: Layout) -> None:
    trace = read_trace(path)
    for round_ in {0, 1, len(trace.rounds) - 1}:
        for prompt in prompts(trace, layout, round_, agents=3):
            user = prompt.chat()[-1]["content"]
            assert user.endswith(prompt.parts[-1].text)
            for part in prompt.parts:
                if part.kind is Kind.SHARED:
                    assert part.text in user
