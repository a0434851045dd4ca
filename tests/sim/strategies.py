"""Random traces and views, small but with every irregularity the format allows."""

from hypothesis import strategies as st

from td_serve.sim.trace import Agent, Header, Round, Trace, Turn
from td_serve.sim.workload import Block, HistoryEntry, SharedRound, View
from td_serve.types import AgentId

words = st.text(alphabet="abc 1.\né井", min_size=1, max_size=30).filter(lambda t: bool(t.strip()))
maybe_words = st.one_of(st.just(""), words)


@st.composite
def traces(draw: st.DrawFn, nulls: bool = False) -> Trace:
    """Traces of 1 to 4 agents and 1 to 5 rounds; agents may be silent or miss a round."""
    ids = [AgentId(f"agent {i}") for i in range(draw(st.integers(1, 4)))]
    outputs = st.one_of(maybe_words, st.none()) if nulls else maybe_words
    rounds = []
    for number in range(draw(st.integers(1, 5))):
        present = draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
        turns = tuple(
            Turn(agent, draw(maybe_words), draw(words), draw(outputs)) for agent in present
        )
        order = tuple(draw(st.permutations(present)))
        rounds.append(Round("round", number, f"r{number}", order, turns))
    header = Header(
        type="header",
        schema="allgather-trace/1",
        trace="random",
        agents=tuple(Agent(agent, draw(maybe_words)) for agent in ids),
        rounds=len(rounds),
        preamble=draw(maybe_words),
    )
    return Trace(header, tuple(rounds))


@st.composite
def all_views(draw: st.DrawFn) -> View:
    """What one agent of up to four may read in a round up to 6."""
    round_ = draw(st.integers(0, 6))
    shared = [
        SharedRound(
            number,
            tuple(
                Block(AgentId(f"speaker {i}"), draw(words)) for i in range(draw(st.integers(0, 4)))
            ),
        )
        for number in range(1, round_ + 1)
    ]
    entries = draw(st.sets(st.integers(0, round_)))
    return View(
        agent=AgentId("reader"),
        round=round_,
        preamble=draw(maybe_words),
        profile=draw(words),
        history=tuple(HistoryEntry(number, draw(words)) for number in sorted(entries)),
        shared=tuple(shared),
        task=draw(words),
    )
