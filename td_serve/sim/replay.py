"""Playing a trace through a running endpoint, round by round.

Each round, all agents send their request at once; the next round starts when the last answer has
ended. What they then read as each other's words is what the trace recorded, or, live, what the
model wrote. Failures are results, not exceptions; a round in which nobody succeeds ends the replay.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai

from td_serve.errors import ReplayError
from td_serve.sim.layouts import Layout, build
from td_serve.sim.member import (
    Clock,
    CutReport,
    Dropped,
    MemberResult,
    Request,
    ServedModel,
    ask,
    discover,
)
from td_serve.sim.tokens import Counter, load_counter
from td_serve.sim.trace import Round, Trace
from td_serve.sim.window import cut_to_window
from td_serve.sim.workload import (
    SharedRound,
    View,
    check_outputs,
    choose_agents,
    choose_rounds,
    recorded_outputs,
    share,
    views,
)
from td_serve.types import AgentId, SessionId


def new_sim() -> SessionId:
    """A session id that no other replay has."""
    return SessionId(f"replay-{uuid.uuid4().hex[:12]}")


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be played, and how."""

    trace: Trace
    agents: int | None = None
    """The first so many of the header; None: all."""
    first_round: int = 0
    rounds: int | None = None
    """So many from `first_round` on; None: all."""
    layout: Layout = Layout.HISTORY_FIRST
    live: bool = False
    """Feed the model's outputs to the next round, instead of the recorded ones."""
    max_tokens: int = 128
    """Most tokens an agent may write; not live and with a tokenizer, the recorded output's length
    bounds it too."""
    temperature: float = 0.0
    seed: int = 0
    as_round: bool = True
    """Tell the server which requests form a round (`td_round`)."""
    deadline_ms: int | None = None
    """How long the server may wait for a round's last member; None: its default."""
    max_concurrency: int | None = None
    sim: SessionId = msgspec.field(default_factory=new_sim)
    model: str | None = None
    """None: the only one served."""
    window: int | None = None
    """In tokens; None: what the server says, and no cutting if it says nothing."""
    tokenizer: Path | None = None
    """A model directory; None: the served model's if it can be read here, else an estimate."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay settled on before its first round."""

    trace: str
    sim: SessionId
    model: str
    layout: Layout
    live: bool
    agents: tuple[AgentId, ...]
    rounds: tuple[int, ...]
    window: int | None
    counting: str
    """How tokens were counted before sending."""
    counting_exact: bool


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one round, in the order of the agents."""

    round: int
    label: str
    wall_s: float
    """From the first request sent to the last answer's end."""
    members: tuple[MemberResult, ...]
    complete: bool = True
    """False when the replay was cancelled in this round: only members that had ended are here."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a replay."""

    setup: Setup
    rounds: tuple[RoundResult, ...]
    stopped: str | None = None
    """Why it ended before the last round; None: it did not."""

    @property
    def failures(self) -> int:
        """Requests that failed or were refused for length."""
        return sum(m.error is not None for r in self.rounds for m in r.members)


OnStart = Callable[[Setup], None]
OnMember = Callable[[MemberResult], None]
OnRound = Callable[[RoundResult], None]


async def replay(
    config: ReplayConfig,
    client: openai.AsyncOpenAI,
    *,
    on_start: OnStart | None = None,
    on_member: OnMember | None = None,
    on_round: OnRound | None = None,
    clock: Clock = time.perf_counter,
) -> ReplayResult:
    """Play the trace. The callbacks run on the event loop, as soon as there is something to tell.

    Cancelled, it cancels all running requests, passes the unfinished round to `on_round` with
    `complete=False`, and raises CancelledError.

    Raises:
        ReplayError: no server or model, or options that do not fit the trace. Never after the first
            request was sent.
    """
    trace = config.trace
    chosen = choose_agents(trace, config.agents)
    rounds = choose_rounds(trace, config.first_round, config.rounds)
    check_outputs(trace, chosen, rounds, config.live)
    _check_concurrency(config, len(chosen))
    served = await discover(client, config.model)
    counter = await asyncio.to_thread(load_counter, config.tokenizer, served.root)
    setup = _setup(config, served, counter, chosen, rounds)
    if on_start is not None:
        on_start(setup)

    player = _Player(config, setup, counter, client, clock, on_member, on_round)
    shared = [share(r, recorded_outputs(r), chosen) for r in trace.rounds[: rounds[0].round]]
    results: list[RoundResult] = []
    stopped: str | None = None
    for round_ in rounds:
        result = await player.play(round_, shared)
        results.append(result)
        if result.members and all(member.error is not None for member in result.members):
            stopped = f"no request of round {round_.round} succeeded"
            break
        outputs = _written(result) if config.live else recorded_outputs(round_)
        shared.append(share(round_, outputs, chosen))
    return ReplayResult(setup=setup, rounds=tuple(results), stopped=stopped)


class _Player:
    """Plays single rounds; holds nothing that changes from one to the next."""

    def __init__(
        self,
        config: ReplayConfig,
        setup: Setup,
        counter: Counter,
        client: openai.AsyncOpenAI,
        clock: Clock,
        on_member: OnMember | None,
        on_round: OnRound | None,
    ) -> None:
        self._config = config
        self._setup = setup
        self._counter = counter
        self._client = client
        self._clock = clock
        self._on_member = on_member
        self._on_round = on_round

    async def play(self, round_: Round, shared: Sequence[SharedRound]) -> RoundResult:
        """Send all requests of a round and wait for the last answer."""
        readers = views(self._config.trace, round_, self._setup.agents, shared)
        ended: dict[AgentId, MemberResult] = {}
        planned: list[tuple[Request, CutReport | None]] = []
        for view in readers:
            plan = self._plan(round_, view)
            if isinstance(plan, MemberResult):
                self._note(plan, ended)
            else:
                planned.append(plan)
        # Who was refused for length sends nothing, so the server must not wait for it.
        requests = [(self._place(request, len(planned)), cut) for request, cut in planned]
        start = self._clock()

        def result(complete: bool) -> RoundResult:
            members = tuple(ended[view.agent] for view in readers if view.agent in ended)
            made = RoundResult(
                round=round_.round,
                label=round_.label,
                wall_s=self._clock() - start,
                members=members,
                complete=complete,
            )
            if self._on_round is not None:
                self._on_round(made)
            return made

        slots = asyncio.Semaphore(self._config.max_concurrency or max(len(requests), 1))
        try:
            async with asyncio.TaskGroup() as group:
                for request, cut in requests:
                    group.create_task(self._ask(request, cut, slots, ended))
        except asyncio.CancelledError:
            result(complete=False)
            raise
        return result(complete=True)

    async def _ask(
        self,
        request: Request,
        cut: CutReport | None,
        slots: asyncio.Semaphore,
        ended: dict[AgentId, MemberResult],
    ) -> None:
        async with slots:
            result = await ask(self._client, request, self._clock)
        self._note(msgspec.structs.replace(result, cut=cut), ended)

    def _note(self, result: MemberResult, ended: dict[AgentId, MemberResult]) -> None:
        ended[result.agent] = result
        if self._on_member is not None:
            self._on_member(result)

    def _plan(self, round_: Round, view: View) -> tuple[Request, CutReport | None] | MemberResult:
        """The request of one member, or why there is none."""
        config = self._config
        prompt = build(config.layout, view)
        max_tokens = config.max_tokens
        turn = round_.turn(view.agent)
        if not config.live and self._counter.exact and turn is not None and turn.output is not None:
            # A silent agent still has to be asked: it takes one token to find out.
            max_tokens = max(1, min(max_tokens, self._counter.text(turn.output)))
        report: CutReport | None = None
        if self._setup.window is not None:
            try:
                cut = cut_to_window(prompt, self._setup.window, max_tokens, self._counter.chat)
            except ReplayError as error:
                return MemberResult(agent=view.agent, round=round_.round, error=str(error))
            prompt = cut.prompt
            if cut.dropped:
                dropped = tuple(Dropped(p.kind, p.round, p.agent) for p in cut.dropped)
                report = CutReport(cut.tokens_before, cut.tokens, dropped)
        request = Request(
            model=self._setup.model,
            agent=view.agent,
            round=round_.round,
            messages=prompt.chat(),
            max_tokens=max_tokens,
            temperature=config.temperature,
            seed=config.seed,
            td_round=None,
        )
        return request, report

    def _place(self, request: Request, n_agents: int) -> Request:
        """The request with its place in a round of `n_agents`."""
        if not self._config.as_round:
            return request
        place: dict[str, Any] = {
            "sim": self._setup.sim,
            "round": request.round,
            "agent": request.agent,
            "n_agents": n_agents,
        }
        if self._config.deadline_ms is not None:
            place["deadline_ms"] = self._config.deadline_ms
        return msgspec.structs.replace(request, td_round=place)


def _check_concurrency(config: ReplayConfig, agents: int) -> None:
    """A server that gathers a round waits for all its members: fewer at once would never do."""
    limit = config.max_concurrency
    if limit is None:
        return
    if limit < 1:
        raise ReplayError(f"max concurrency is {limit}: expected 1 or more")
    if config.as_round and limit < agents:
        raise ReplayError(
            f"max concurrency is {limit}, but the server waits for all {agents} agents of a round: "
            f"allow {agents}, or send the requests with --no-round"
        )


def _setup(
    config: ReplayConfig,
    served: ServedModel,
    counter: Counter,
    chosen: Sequence[AgentId],
    rounds: Sequence[Round],
) -> Setup:
    return Setup(
        trace=config.trace.name,
        sim=config.sim,
        model=served.name,
        layout=config.layout,
        live=config.live,
        agents=tuple(chosen),
        rounds=tuple(round_.round for round_ in rounds),
        window=config.window if config.window is not None else served.window,
        counting=counter.name,
        counting_exact=counter.exact,
    )


def _written(result: RoundResult) -> Mapping[AgentId, str]:
    """What the model wrote; members that failed are left out."""
    return {m.agent: m.text for m in result.members if m.error is None and m.text is not None}
