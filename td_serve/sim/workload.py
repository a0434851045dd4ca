"""What each agent has to read in a round: the trace's text plus last round's outputs. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from td_serve.errors import ReplayError
from td_serve.sim.trace import Round, Trace
from td_serve.types import AgentId


class Block(msgspec.Struct, frozen=True):
    """One agent's output of the round before, verbatim: the same for all its readers."""

    speaker: AgentId
    text: str


class SharedRound(msgspec.Struct, frozen=True):
    """The blocks that round `round` is given, which is what round `round - 1` said."""

    round: int
    blocks: tuple[Block, ...]


class HistoryEntry(msgspec.Struct, frozen=True):
    """What the agent alone learned before round `round`."""

    round: int
    text: str


class View(msgspec.Struct, frozen=True):
    """All that one agent may read in one round, in no layout yet."""

    agent: AgentId
    round: int
    preamble: str
    profile: str
    history: tuple[HistoryEntry, ...]
    """Entries of rounds 0 to `round`, oldest first; empty ones are left out."""
    shared: tuple[SharedRound, ...]
    """Of rounds 1 to `round`, oldest first; a layout may use the last alone."""
    task: str


def choose_agents(trace: Trace, count: int | None) -> tuple[AgentId, ...]:
    """The first `count` agents of the header (None: all).

    Raises:
        ReplayError: the trace has fewer agents, or `count` is below 1.
    """
    ids = trace.header.agent_ids
    if count is None:
        return ids
    if not 1 <= count <= len(ids):
        raise ReplayError(f"agents is {count}: trace {trace.name!r} has 1 to {len(ids)}")
    return ids[:count]


def choose_rounds(trace: Trace, first: int, count: int | None) -> tuple[Round, ...]:
    """`count` rounds from round `first` on (None: all that follow).

    Raises:
        ReplayError: the trace does not have them.
    """
    have = len(trace.rounds)
    if not 0 <= first < have:
        raise ReplayError(
            f"first round is {first}: trace {trace.name!r} has rounds 0 to {have - 1}"
        )
    left = have - first
    if count is None:
        return trace.rounds[first:]
    if not 1 <= count <= left:
        raise ReplayError(
            f"rounds is {count}: trace {trace.name!r} has {left} from round {first} on"
        )
    return trace.rounds[first : first + count]


def check_outputs(
    trace: Trace, chosen: Sequence[AgentId], rounds: Sequence[Round], live: bool
) -> None:
    """Check that every output that will be fed back was recorded.

    Raises:
        ReplayError: an output is null. Live, only those before the first round played matter.
    """
    last = rounds[0].round if live else rounds[-1].round
    for round_ in trace.rounds[:last]:
        for turn in round_.agents:
            if turn.output is not None or turn.agent_id not in chosen:
                continue
            if not live:
                raise ReplayError(
                    f"trace {trace.name!r} records no output of {turn.agent_id!r} in round "
                    f"{round_.round}: play it with --live, so that the model writes it"
                )
            raise ReplayError(
                f"trace {trace.name!r} records no output of {turn.agent_id!r} in round "
                f"{round_.round}, which round {rounds[0].round} would start from: "
                "start a live replay at round 0"
            )


def recorded_outputs(round_: Round) -> dict[AgentId, str]:
    """What was recorded in a round; agents without a record are left out."""
    return {turn.agent_id: turn.output for turn in round_.agents if turn.output is not None}


def share(round_: Round, outputs: Mapping[AgentId, str], chosen: Sequence[AgentId]) -> SharedRound:
    """What the round after `round_` is given: `outputs`, in `round_`'s order.

    Agents that are not chosen, have no output, or said nothing but white space are skipped.
    """
    blocks = tuple(
        Block(speaker=agent, text=outputs[agent])
        for agent in round_.order
        if agent in chosen and outputs.get(agent, "").strip()
    )
    return SharedRound(round=round_.round + 1, blocks=blocks)


def views(
    trace: Trace, round_: Round, chosen: Sequence[AgentId], shared: Sequence[SharedRound]
) -> tuple[View, ...]:
    """What each chosen agent that takes part in `round_` may read, in the header's order.

    `shared` holds the rounds before, oldest first, up to and including what `round_` is given.
    """
    profiles = {agent.agent_id: agent.profile for agent in trace.header.agents}
    made = []
    for agent in chosen:
        turn = round_.turn(agent)
        if turn is None:
            continue
        past = ((r.round, r.turn(agent)) for r in trace.rounds[: round_.round + 1])
        history = tuple(
            HistoryEntry(round=number, text=then.history_append)
            for number, then in past
            if then is not None and then.history_append.strip()
        )
        made.append(
            View(
                agent=agent,
                round=round_.round,
                preamble=trace.header.preamble,
                profile=profiles[agent],
                history=history,
                shared=tuple(s for s in shared if s.round <= round_.round),
                task=turn.task,
            )
        )
    return tuple(made)
