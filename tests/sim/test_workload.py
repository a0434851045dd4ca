"""What an agent may read: whose outputs, in which order, and how much of its history."""

import pytest
from hypothesis import given

from td_serve.errors import ReplayError
from td_serve.sim.trace import Trace
from td_serve.sim.workload import (
    check_outputs,
    choose_agents,
    choose_rounds,
    recorded_outputs,
    share,
    views,
)
from td_serve.types import AgentId
from tests.sim.strategies import traces


@given(traces())
def test_shared_blocks_are_what_chosen_agents_said_in_the_rounds_order(trace: Trace) -> None:
    chosen = choose_agents(trace, max(1, len(trace.header.agents) - 1))
    for round_ in trace.rounds:
        said = share(round_, recorded_outputs(round_), chosen)
        assert said.round == round_.round + 1
        speakers = [block.speaker for block in said.blocks]
        assert speakers == [agent for agent in round_.order if agent in speakers]
        assert set(speakers) <= set(chosen)
        for agent in chosen:
            turn = round_.turn(agent)
            spoke = turn is not None and bool((turn.output or "").strip())
            assert (agent in speakers) == spoke
        for block in said.blocks:
            turn = round_.turn(block.speaker)
            assert turn is not None
            assert block.text == turn.output


@given(traces())
def test_a_view_holds_the_whole_history_and_all_shared_rounds_up_to_now(trace: Trace) -> None:
    chosen = choose_agents(trace, None)
    shared = [share(r, recorded_outputs(r), chosen) for r in trace.rounds]
    for round_ in trace.rounds:
        made = views(trace, round_, chosen, shared)
        assert [v.agent for v in made] == [a for a in chosen if round_.turn(a) is not None]
        for view in made:
            assert [s.round for s in view.shared] == list(range(1, round_.round + 1))
            turns = [(r.round, r.turn(view.agent)) for r in trace.rounds[: round_.round + 1]]
            assert [(entry.round, entry.text) for entry in view.history] == [
                (number, turn.history_append)
                for number, turn in turns
                if turn is not None and turn.history_append.strip()
            ]


def test_choices_beyond_the_trace_are_refused_with_both_numbers(village: Trace) -> None:
    assert choose_agents(village, 2) == ("Marta", "Osk")
    assert [r.round for r in choose_rounds(village, 2, 3)] == [2, 3, 4]
    with pytest.raises(ReplayError, match=r"agents is 5: .* 1 to 4"):
        choose_agents(village, 5)
    with pytest.raises(ReplayError, match=r"first round is 6: .* 0 to 5"):
        choose_rounds(village, 6, None)
    with pytest.raises(ReplayError, match=r"rounds is 5: .* has 4 from round 2 on"):
        choose_rounds(village, 2, 5)


@given(traces(nulls=True))
def test_outputs_that_are_not_recorded_ask_for_live(trace: Trace) -> None:
    chosen = choose_agents(trace, None)
    missing = {
        (round_.round, turn.agent_id)
        for round_ in trace.rounds
        for turn in round_.agents
        if turn.output is None
    }
    for first in range(len(trace.rounds)):
        rounds = trace.rounds[first:]
        if any(number < rounds[-1].round for number, _ in missing):
            with pytest.raises(ReplayError, match=r"--live|live replay"):
                check_outputs(trace, chosen, rounds, live=False)
        else:
            check_outputs(trace, chosen, rounds, live=False)
        if any(number < first for number, _ in missing):
            with pytest.raises(ReplayError, match=r"start a live replay at round 0"):
                check_outputs(trace, chosen, rounds, live=True)
        else:
            check_outputs(trace, chosen, rounds, live=True)


def test_outputs_of_agents_that_do_not_play_may_be_missing(village: Trace) -> None:
    check_outputs(village, [AgentId("Marta")], village.rounds, live=False)
