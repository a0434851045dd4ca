"""Runs rounds: gather the members, plan, prefill as one unit, decode each, keep the record.

One coordinator serves many sessions; a session lives on one coordinator (requests are routed by
consistent hashing on it). It holds text and plans, no KV. If it is lost, so is the record of past
rounds: clients of the rounds API then hand the last round's outputs in themselves.

Reading one round top-down: `play` joins the member to its round (`collector.Session`); the first
member starts `_conduct`, which waits for the others, plans the round and hands each member its
prefill; `play` then decodes the member and records what it put out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable

import msgspec

from td_serve.authors import Kept, Turn
from td_serve.collector import Admission, Member, MemberState, Round, Session, plan_round
from td_serve.config import CoordinatorSettings
from td_serve.conversations import writes
from td_serve.dispatch import Dispatcher, Engines
from td_serve.errors import BadRequest, RequestError, RoundConflict, Unavailable
from td_serve.metrics import Metrics
from td_serve.quotes import Quotes
from td_serve.reuse import ALL_EXACT, Reuse, plan_reuse
from td_serve.tasks import Tasks
from td_serve.tenants import sim_of
from td_serve.types import (
    AgentId,
    AgentOutput,
    Canonical,
    ConversationKey,
    Delta,
    Forecast,
    GenerateRequest,
    Handle,
    Handover,
    Membership,
    RoundPrefill,
    RoundRecord,
    Said,
    SessionId,
)

log = logging.getLogger(__name__)


class RoundCoordinator:
    """Serves members of rounds on `engines`. `clock` is in seconds and only ever compared."""

    def __init__(
        self,
        engines: Engines,
        settings: CoordinatorSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = Dispatcher(engines, settings.dispatch, metrics, clock)
        self._metrics = metrics
        self._clock = clock
        self._sessions: OrderedDict[SessionId, Session] = OrderedDict()
        self._full: dict[int, asyncio.Event] = {}
        self._handovers: dict[int, asyncio.Future[Handover | None]] = {}
        self._conductors: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()
        self._background = Tasks()
        self.configure(settings)

    def configure(self, settings: CoordinatorSettings) -> None:
        """Take new tunables; rounds under way keep theirs, sessions their `rounds_kept`."""
        self._settings = settings
        self._dispatcher.settings = settings.dispatch

    async def play(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Serve one member of a round: wait for the others, then stream its output.

        Raises RoundConflict, and what Dispatcher.generate raises. Cancelling it takes the member
        out of its round.
        """
        if request.membership is None:
            raise BadRequest("td_round: missing, expected a member of a round", field="td_round")
        came = self._clock()
        admission = self._join(request, request.membership)
        member, output = admission.member, _Output(admission.member.agent)
        try:
            if admission.alone is None:
                handover = await self._wait_for_prefill(admission)
            else:
                log.info("session %r: serving alone: %s", admission.round.sim, admission.alone)
                self._metrics.stragglers.inc()
                handover = None
            waited = msgspec.structs.replace(
                request,
                age_s=request.age_s + self._clock() - came,
                writes=self._writes(admission),
            )
            deltas = self._dispatcher.generate(waited, handover)
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    output.add(delta)
                    if delta.finished:
                        # Before the client has it: it may close the stream as soon as it has.
                        member.finish(output.result(), delta.handle)
                        self._replace_written(admission, delta.handle)
                    yield delta if delta.handle is None else _without_handle(delta)
        finally:
            self._depart(admission)

    def excuse(self, membership: Membership) -> None:
        """A member's request was refused before it came here: its round goes on without it."""
        session = self._session(membership.sim)
        round_ = session.excuse(membership, self._clock(), patience_s=self._patience(membership))
        if round_ is not None:
            self._gather(round_)

    async def record(self, sim: SessionId, number: int, patience_s: float) -> RoundRecord:
        """The outputs of round `number`, once its members are done or `patience_s` has passed.

        Raises RoundConflict when this coordinator does not remember the round.
        """
        session = self._sessions.get(sim)
        round_ = None if session is None else session.rounds.get(number)
        if round_ is None:
            raise RoundConflict(
                f"round: the outputs of round {number} of sim {sim_of(sim)!r} are not on record "
                "here; hand them in as `shared`",
                field="round",
            )
        deadline = self._clock() + min(patience_s, self._settings.max_deadline_ms / 1000)
        while not round_.is_finished and (left := deadline - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), left)
        return round_.record()

    def forget(self, sim: SessionId) -> bool:
        """Drop a session and its record. Says whether there was one.

        Raises RoundConflict while a round of it is under way.
        """
        session = self._sessions.get(sim)
        if session is None:
            return False
        if not session.is_idle:
            raise RoundConflict(f"sim: {sim_of(sim)!r} has a round under way", field="sim")
        del self._sessions[sim]
        self._free_written(session)
        return True

    def check_integrity(self) -> None:
        """Nothing is held for rounds that are over. Raises AssertionError."""
        open_rounds = {id(r) for s in self._sessions.values() for r in s.rounds.values()}
        assert self._full.keys() <= open_rounds, "an event of a round that is gone"
        waiting = {
            id(member)
            for session in self._sessions.values()
            for round_ in session.rounds.values()
            for member in round_.members.values()
            if member.state in (MemberState.WAITING, MemberState.RUNNING)
        }
        assert self._handovers.keys() <= waiting, "a handover kept for a member that is gone"

    async def drain(self) -> None:
        """Wait until no round is under way and no release is pending."""
        while self._conductors:
            await asyncio.wait(self._conductors)
        await self._background.drain()
        await self._dispatcher.drain()

    # ---------------------------------------------------------------- joining and leaving

    def _join(self, request: GenerateRequest, membership: Membership) -> Admission:
        """Admit the member; start the round's conductor with the first one."""
        session = self._session(membership.sim)
        admission = session.join(
            membership, request, self._clock(), patience_s=self._patience(membership)
        )
        round_, member = admission.round, admission.member
        if admission.alone is not None:
            return admission
        self._handovers[id(member)] = asyncio.get_running_loop().create_future()
        self._gather(round_)
        return admission

    def _gather(self, round_: Round) -> None:
        """See that somebody conducts an open round, and knows when it is full."""
        if id(round_) not in self._full:
            self._full[id(round_)] = asyncio.Event()
            conductor = asyncio.get_running_loop().create_task(self._conduct(round_))
            self._conductors.add(conductor)
            conductor.add_done_callback(self._conductors.discard)
        if round_.is_full:
            self._full[id(round_)].set()

    def _depart(self, admission: Admission) -> None:
        """The member's request is over, whichever way. Frees what is held for it."""
        member = admission.member
        future = self._handovers.pop(id(member), None)
        handed = future is not None and future.done() and not future.cancelled()
        if future is not None and handed and (handover := future.result()) is not None:
            self._dispatcher.give_up(handover)
        if member.state is MemberState.WAITING:
            self._sessions[admission.round.sim].leave(admission.round, member)
            if not admission.round.members:
                self._full[id(admission.round)].set()  # nobody is left to wait for
        elif member.state is MemberState.RUNNING:
            member.state = MemberState.FAILED
            if future is not None and not handed:
                self._dispatcher.abandon(member.asked.request_id)
        member.forget_request()
        self._tell()
        if admission.alone is None and admission.round.is_finished:
            self._metrics.round_seconds.observe(self._clock() - admission.round.opened_at)

    def _writes(self, admission: Admission) -> ConversationKey | None:
        """Under what the member's turn is kept for those who read what it puts out."""
        membership = admission.member.asked.membership
        if not self._settings.reuse.reads_authors or membership is None or not membership.kept:
            return None
        return writes(admission.round.sim, admission.member.agent)

    def _replace_written(self, admission: Admission, handle: Handle | None) -> None:
        """A turn has ended: what was kept of the agent's last one for its output alone has ended
        with it where this one is kept the same way, and ends now where it is not."""
        sim, agent = admission.round.sim, admission.member.agent
        if (session := self._sessions.get(sim)) is None:
            return
        if handle is not None and handle.conversation == writes(sim, agent):
            session.writers.add(agent)
        elif agent in session.writers:
            session.writers.discard(agent)
            self._background.run(self._free(writes(sim, agent)))

    def _free_written(self, session: Session) -> None:
        """Nobody will read what a session's agents have put out."""
        for agent in session.writers:
            self._background.run(self._free(writes(session.sim, agent)))

    async def _free(self, conversation: ConversationKey) -> None:
        """Free what is kept, if whoever keeps it can be asked; its lease ends by itself."""
        try:
            await self._dispatcher.engines.forget(conversation)
        except RequestError as error:
            log.warning("what a session's agents put out is kept a while: %s", error.message)

    def _tell(self) -> None:
        """Wake those who wait for a round to finish."""
        self._progress.set()
        self._progress = asyncio.Event()

    def _session(self, sim: SessionId) -> Session:
        """The session of `sim`, made if new; the least recently used idle ones go first."""
        session = self._sessions.get(sim)
        if session is None:
            session = self._sessions[sim] = Session(sim, self._settings.rounds_kept)
        self._sessions.move_to_end(sim)
        surplus = len(self._sessions) - self._settings.sessions_kept
        if surplus > 0:
            idle = (old for old, kept in self._sessions.items() if kept.is_idle and old != sim)
            for old in list(itertools.islice(idle, surplus)):
                self._free_written(self._sessions.pop(old))
        return session

    def _patience(self, membership: Membership) -> float:
        """Seconds that a round opened by this member waits for the others."""
        settings = self._settings
        if membership.deadline_ms is not None:
            return min(membership.deadline_ms, settings.max_deadline_ms) / 1000
        if membership.round is None:
            return settings.implicit_window_ms / 1000
        return settings.deadline_ms / 1000

    # ---------------------------------------------------------------- conducting a round

    async def _wait_for_prefill(self, admission: Admission) -> Handover | None:
        """This member's prefill, or None when the member must see to it itself."""
        handover = await self._handovers[id(admission.member)]
        del self._handovers[id(admission.member)]
        return handover

    async def _conduct(self, round_: Round) -> None:
        """Wait for the members, prefill the round as one unit, hand each member its part."""
        started = self._clock()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, round_.deadline_at - started)):
                    await self._full[id(round_)].wait()
        finally:
            members = round_.close()
            del self._full[id(round_)]
            self._tell()  # a round that all have left is finished
        if not members:
            return  # all have left
        try:
            await self._prefill(round_, members, self._clock() - started)
        except Exception:
            log.exception("round %s of sim %r is not one unit", round_.number, round_.sim)
        finally:
            # Whoever got nothing prefills for itself, with retries: a lost prefill replica, or one
            # bad member, must not fail the others.
            for member in members:
                self._hand_to(member, None)

    async def _prefill(self, round_: Round, members: list[Member], gathered_s: float) -> None:
        """Have a closed round prefilled, and hand each member its part as it comes."""
        kept = self._kept_before(round_)
        reuse = await self._reuse(round_, members, [one.turn for one in kept])
        members = [member for member in members if member.request is not None]
        if not members:
            return  # all have left
        reuse = reuse.of({member.asked.request_id for member in members})
        plan = plan_round(round_, members, reuse)
        alone = Counter(reuse.reasons.values())
        for why, count in alone.items():
            self._metrics.members_alone[why].inc(float(count))
        log.info(
            "round %s of sim %r: %d members, %d absent, %d share texts%s",
            round_.number,
            round_.sim,
            len(members),
            plan.absent,
            sum(len(spec.members) for spec in reuse.passes),
            "".join(f"; {count}: {why.value}" for why, count in alone.items()),
        )
        self._metrics.round_members.observe(len(members))
        self._metrics.gather_seconds.observe(gathered_s)
        by_request = {member.asked.request_id: member for member in members}
        for member in members:
            if not member.asked.hand_over:
                self._hand_to(member, None)
        written = {one.name for spec in reuse.passes for one in spec.written}
        work = RoundPrefill(
            plan=plan,
            requests=[member.asked for member in members if member.asked.hand_over],
            passes=reuse.passes,
            histories={str(one): name for one, name in reuse.histories.items()},
            turns={str(one.turn.lease): one.handle for one in kept if one.turn.lease in written},
        )
        if not work.requests:
            return
        if self._settings.reuse.ahead and not self._settings.reuse.reads_authors:
            self._foresee(round_, reuse)
        try:
            blended = 0
            done = self._dispatcher.engines.prefill_round(work)
            async with contextlib.aclosing(done):
                async for part in done:
                    if part.error is not None:
                        log.warning("prefill of %s: %s", part.request_id, part.error)
                    blended += part.handover is not None and part.handover.blended is not None
                    self._hand_to(by_request[part.request_id], part.handover)
            if reuse.passes:
                log.info(
                    "round %s of sim %r: %d of those that share texts were blended, the others "
                    "prefilled as they are",
                    round_.number,
                    round_.sim,
                    blended,
                )
        except Unavailable as error:
            log.warning("round %s of sim %r: %s", round_.number, round_.sim, error.message)
        except RequestError:
            log.exception("round %s of sim %r", round_.number, round_.sim)

    async def _reuse(self, round_: Round, members: list[Member], said_in: list[Turn]) -> Reuse:
        """What the round's members share, if that shall be computed once, or taken from the turns
        in which it was said."""
        settings = self._settings.reuse
        if settings.mode == "exact":
            return ALL_EXACT
        said = self._said_before(round_)
        turns = said_in if settings.reads_authors else None
        asked = {member.agent: member.asked for member in members}
        head = next((one.head for one in asked.values() if one.head), [])

        def plan() -> Reuse:
            quotes = Quotes(said)
            requests = {agent: _in_segments(one, quotes) for agent, one in asked.items()}
            return plan_reuse(round_.sim, requests, settings.as_rule(), head, turns)

        # It reads every prompt. Members may leave meanwhile.
        return await asyncio.to_thread(plan)

    def _said_before(self, round_: Round) -> list[list[int]]:
        """The tokens of all outputs on record of the session's other rounds."""
        session = self._sessions.get(round_.sim)
        others = [] if session is None else [r for r in session.rounds.values() if r is not round_]
        return [output.token_ids for other in others for output in other.record().outputs]

    def _kept_before(self, round_: Round) -> list[Kept]:
        """The agents' last turns before this round, those whose KV is kept."""
        session = self._sessions.get(round_.sim)
        return [] if session is None else list(session.kept(but=round_).values())

    def _foresee(self, round_: Round, reuse: Reuse) -> None:
        """Have what the round puts out prepared for the next one, where the members of this one
        share what was put out before it."""
        session = self._sessions.get(round_.sim)
        if session is None or len(reuse.passes) != 1:
            return
        (spec,) = reuse.passes
        grows = session.share(spec.canonical)
        before = session.rounds.get(round_.number - 1)
        if before is not None:
            self._background.run(self._prepare(round_, before.record(), spec.canonical, grows))

    async def _prepare(
        self, round_: Round, before: RoundRecord, last: Canonical, grows: bool
    ) -> None:
        """Tell a prefill replica what the round puts out, as it comes: whenever as much again as it
        knows is known without a gap, and at the end."""
        told = 0
        is_finished = False
        while not is_finished:
            progress, is_finished = self._progress, round_.is_finished
            now = {output.agent: output.text for output in round_.record().outputs}
            pending = set(round_.pending)
            said = [
                Said(
                    before=output.text,
                    now=now.get(output.agent, None if output.agent in pending else ""),
                )
                for output in before.outputs
            ]
            known = sum(1 for _ in itertools.takewhile(lambda one: one.now is not None, said))
            if known > told and (is_finished or known >= 2 * told):
                told = known
                forecast = Forecast(sim=round_.sim, last=last, grows=grows, said=said)
                # An engine that stands still must not keep one of these for every round.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.dispatch.patience_s):
                        await self._dispatcher.engines.prepare(forecast)
            elif not is_finished:
                await progress.wait()
        log.info("round %s of sim %r: told what it put out", round_.number, round_.sim)

    def _hand_to(self, member: Member, handover: Handover | None) -> None:
        """Give a member its prefill; if it has left or has one already, give the prefill up."""
        future = self._handovers.get(id(member))
        if future is not None and not future.done():
            future.set_result(handover)
        elif handover is not None:
            self._dispatcher.give_up(handover)


def _in_segments(request: GenerateRequest, quotes: Quotes) -> GenerateRequest:
    """A request whose prompt its client has not cut: it is, where it repeats what was said."""
    if request.cuts:
        return request
    return msgspec.structs.replace(request, cuts=quotes.cuts(request.prompt_token_ids))


def _without_handle(delta: Delta) -> Delta:
    """What is a client's business of it."""
    return msgspec.structs.replace(delta, handle=None)


class _Output:
    """What a member puts out, gathered from its deltas (its first continuation)."""

    def __init__(self, agent: AgentId) -> None:
        self._agent = agent
        self._text: list[str] = []
        self._tokens: list[int] = []

    def add(self, delta: Delta) -> None:
        for choice in delta.choices:
            if choice.index == 0:
                self._text.append(choice.text)
                self._tokens += choice.token_ids

    def result(self) -> AgentOutput:
        return AgentOutput(agent=self._agent, text="".join(self._text), token_ids=self._tokens)
