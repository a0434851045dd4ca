"""Gathering agents into rounds. Pure: no I/O, no clock of its own, times in seconds.

A session holds its rounds by number. A round opens with its first member, and closes when all
`n_agents` have joined or its deadline has passed; then it is planned and dispatched as one unit:

    open ──(full | deadline)──► closed ──(every member done or failed)──► finished

Who comes after that is late and is served alone. An agent may be in a round once; if its request
failed or was cancelled, it may come again, alone.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from td_serve.authors import Kept
from td_serve.errors import BadRequest, RoundConflict
from td_serve.reuse import ALL_EXACT, Reuse
from td_serve.segments import key
from td_serve.tenants import sim_of
from td_serve.types import (
    AgentId,
    AgentOutput,
    Canonical,
    GenerateRequest,
    Handle,
    MemberPass,
    MemberPlan,
    Membership,
    Mode,
    Piece,
    Placement,
    RoundPlan,
    RoundRecord,
    SegmentKey,
    SessionId,
    Source,
)

FORGOTTEN_KEPT = 64
"""How many numbers of rounds that are not remembered any more a session still knows."""


class MemberState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass
class Member:
    """An agent in a round, its request, and what has become of it."""

    agent: AgentId
    request: GenerateRequest | None
    """None once it has been served or has failed: a record keeps no prompts."""
    position: int | None = None
    state: MemberState = MemberState.WAITING
    output: AgentOutput | None = None
    kept: Kept | None = None
    """Its turn, if the KV of what it put out is kept for others."""

    @property
    def asked(self) -> GenerateRequest:
        """The request of a member that is waiting or running."""
        assert self.request is not None, f"{self.agent} is {self.state.value}"
        return self.request

    def finish(self, output: AgentOutput, handle: Handle | None = None) -> None:
        """It has been served. Mutates: done, with what it put out on record, and whose KV `handle`
        stands for."""
        self.output = output
        if handle is not None:
            self.kept = Kept.of(self.asked, output.token_ids, handle)
        self.state = MemberState.DONE

    def forget_request(self) -> None:
        """Its request is over, whichever way."""
        self.request = None


@dataclass
class Round:
    """One round of a session. `expected` is None where the number of agents is not known."""

    sim: SessionId
    number: int
    expected: int | None
    opened_at: float
    deadline_at: float
    deadline_ms: int | None = None
    """As its first member stated it."""
    closed: bool = False
    members: dict[AgentId, Member] = field(default_factory=dict)
    excused: set[AgentId] = field(default_factory=set)
    """Agents whose requests were refused: nobody waits for them. They may still come."""

    @property
    def is_full(self) -> bool:
        here = len(self.members) + len(self.excused)
        return self.expected is not None and here >= self.expected

    @property
    def is_finished(self) -> bool:
        """Closed, and no member is waiting or running."""
        return self.closed and not self.pending

    @property
    def pending(self) -> list[AgentId]:
        """Members that are waiting or running."""
        return [
            member.agent
            for member in self.members.values()
            if member.state in (MemberState.WAITING, MemberState.RUNNING)
        ]

    def close(self) -> list[Member]:
        """Close the round. Returns the members to be dispatched, in the round's one order.

        Mutates: the round is closed, its waiting members are running.
        """
        self.closed = True
        waiting = [m for m in self.in_order() if m.state is MemberState.WAITING]
        for member in waiting:
            member.state = MemberState.RUNNING
        return waiting

    def in_order(self) -> list[Member]:
        """The one order of members for everybody: given positions first, then by name."""

        def place(member: Member) -> tuple[bool, int, str]:
            return member.position is None, member.position or 0, member.agent

        return sorted(self.members.values(), key=place)

    def record(self) -> RoundRecord:
        """What has been put out so far, in the one order."""
        outputs = [m.output for m in self.in_order() if m.output is not None]
        return RoundRecord(
            sim=self.sim, round=self.number, outputs=outputs, complete=self.is_finished
        )


@dataclass(frozen=True)
class Admission:
    """A member has joined `round`; `alone` says why it is served by itself, if it is."""

    round: Round
    member: Member
    alone: str | None = None


class Session:
    """The rounds of one simulation. `rounds_kept` finished ones are remembered."""

    def __init__(self, sim: SessionId, rounds_kept: int) -> None:
        self.sim = sim
        self.rounds: OrderedDict[int, Round] = OrderedDict()
        self._shared: tuple[int, SegmentKey] | None = None
        """How many tokens the last canonical sequence had, and which."""
        self._rounds_kept = rounds_kept
        self._implicit_open: Round | None = None
        self._known_agents: set[AgentId] = set()
        self._forgotten: deque[int] = deque(maxlen=FORGOTTEN_KEPT)
        self.writers: set[AgentId] = set()
        """Agents of whom a turn may be kept for nothing but what it has put out."""

    @property
    def is_idle(self) -> bool:
        return all(round_.is_finished for round_ in self.rounds.values())

    def join(
        self,
        membership: Membership,
        request: GenerateRequest,
        now: float,
        *,
        patience_s: float,
    ) -> Admission:
        """Admit a member to its round, opening the round if it is the first.

        `patience_s` is how long a round that this member opens waits for the others.
        Raises RoundConflict when the member contradicts its round, BadRequest when it has no place.
        Mutates: opens the round, adds the member, forgets rounds that are too old.
        """
        _check_place(membership)
        round_ = self._round_of(membership, now, patience_s)
        excused = membership.agent in round_.excused
        round_.excused.discard(membership.agent)
        try:
            alone = self._refuse_or_alone(round_, membership, now)
        except RoundConflict:
            if excused:
                round_.excused.add(membership.agent)
            raise
        member = Member(
            agent=membership.agent,
            request=request,
            position=membership.position,
            state=MemberState.WAITING if alone is None else MemberState.RUNNING,
        )
        round_.members[membership.agent] = member
        self._known_agents.add(membership.agent)
        return Admission(round_, member, alone)

    def excuse(self, membership: Membership, now: float, *, patience_s: float) -> Round | None:
        """A member's request was refused: its round, if it is named, goes on without it.

        Gives that round, if it is still open. Mutates: opens the round if it is the first to come.
        """
        if membership.round is None or membership.n_agents is None:
            return None  # who is expected there is not known beforehand
        round_ = self._round_of(membership, now, patience_s)
        if round_.closed or membership.agent in round_.members:
            return None
        if membership.n_agents != round_.expected:
            return None
        round_.excused.add(membership.agent)
        return round_

    def _round_of(self, membership: Membership, now: float, patience_s: float) -> Round:
        if membership.round is None:
            return self._implicit_round(membership, now, patience_s)
        known = self.rounds.get(membership.round)
        if known is not None:
            return known
        opened = self._open(membership.round, membership.n_agents, now, patience_s)
        opened.deadline_ms = membership.deadline_ms
        return opened

    def kept(self, but: Round | None = None) -> dict[AgentId, Kept]:
        """The last turn of every agent whose KV is kept, of all rounds but one."""
        return {
            member.agent: member.kept
            for _, round_ in sorted(self.rounds.items())
            if round_ is not but
            for member in round_.in_order()
            if member.kept is not None
        }

    def share(self, canonical: Canonical) -> bool:
        """A round's members share this. Says whether it is what they shared before, and more.

        Mutates: it is what they have shared last.
        """
        tokens = canonical.token_ids
        before, self._shared = self._shared, (len(tokens), key((), tokens))
        if before is None or before[0] >= len(tokens):
            return False
        return before == (before[0], key((), tokens[: before[0]]))

    def leave(self, round_: Round, member: Member) -> None:
        """A member that was still waiting is gone; its agent may join again.

        Mutates: takes it out of the round, and drops a round that nobody is in any more.
        """
        if member.state is MemberState.WAITING and round_.members.get(member.agent) is member:
            del round_.members[member.agent]
            if (
                not round_.members
                and not round_.excused
                and self.rounds.get(round_.number) is round_
            ):
                del self.rounds[round_.number]
                if self._implicit_open is round_:
                    self._implicit_open = None

    def _refuse_or_alone(self, round_: Round, membership: Membership, now: float) -> str | None:
        """Why the member is served alone (None: it is not). Raises RoundConflict."""
        where = f"round {round_.number} of sim {sim_of(self.sim)!r}"
        if membership.n_agents is not None and membership.n_agents != round_.expected:
            opened = (
                "by agents that do not say how many they are"
                if round_.expected is None
                else f"for {round_.expected} agents"
            )
            raise RoundConflict(
                f"td_round.n_agents: {membership.n_agents}, but {where} was opened {opened}",
                field="td_round.n_agents",
            )
        stated = (membership.deadline_ms, round_.deadline_ms)
        if None not in stated and stated[0] != stated[1]:
            raise RoundConflict(
                f"td_round.deadline_ms: {membership.deadline_ms}, but {where} "
                f"was opened with {round_.deadline_ms}",
                field="td_round.deadline_ms",
            )
        before = round_.members.get(membership.agent)
        if before is not None and before.state is not MemberState.FAILED:
            verb = {
                MemberState.WAITING: "is already waiting in",
                MemberState.RUNNING: "is already being served in",
                MemberState.DONE: "has already been served in",
            }[before.state]
            raise RoundConflict(
                f"td_round.agent: {membership.agent!r} {verb} {where}", field="td_round.agent"
            )
        if before is not None:
            return f"{membership.agent!r} comes again after a failure in {where}"
        if round_.closed:
            return f"{where} closed without {membership.agent!r}"
        if round_.is_full:
            raise RoundConflict(
                f"td_round.agent: {membership.agent!r} is one too many, "
                f"{where} has all of its {round_.expected} agents",
                field="td_round.agent",
            )
        return None

    def _implicit_round(self, membership: Membership, now: float, patience_s: float) -> Round:
        """The round that the zero-change path means: the open one, unless the agent is in it."""
        current = self._implicit_open
        expected = len(self._known_agents | {membership.agent})
        if current is not None and not current.closed and membership.agent not in current.members:
            if current.expected is not None:
                current.expected = expected  # a newcomer is one more, and takes nobody's place
            return current
        first = not self._known_agents
        number = max([*self.rounds, *self._forgotten], default=-1) + 1
        self._implicit_open = self._open(number, None if first else expected, now, patience_s)
        return self._implicit_open

    def _open(self, number: int, expected: int | None, now: float, patience_s: float) -> Round:
        finished = [number for number, old in self.rounds.items() if old.is_finished]
        for old in finished[: max(0, len(finished) - self._rounds_kept)]:
            del self.rounds[old]
            self._forgotten.append(old)
        self.rounds[number] = Round(
            sim=self.sim,
            number=number,
            expected=expected,
            opened_at=now,
            deadline_at=now + patience_s,
            # Whoever comes to a round that has been and is forgotten is late: nobody else comes.
            closed=number in self._forgotten,
        )
        return self.rounds[number]


def plan_round(round_: Round, members: list[Member], reuse: Reuse = ALL_EXACT) -> RoundPlan:
    """The plan of a closed round: members in passes are blended, the others ordinary prefills.

    `members` are those to be dispatched, in the round's order.
    """
    parts = {part.request_id: part for spec in reuse.passes for part in spec.members}
    absent = 0 if round_.expected is None else max(0, round_.expected - len(round_.members))
    return RoundPlan(
        sim=round_.sim,
        round=round_.number,
        members=[
            _plan_member(member, parts.get(member.asked.request_id), reuse) for member in members
        ],
        absent=absent,
    )


def _plan_member(member: Member, part: MemberPass | None, reuse: Reuse) -> MemberPlan:
    request = member.asked
    return MemberPlan(
        agent=member.agent,
        request_id=request.request_id,
        mode=Mode.EXACT if part is None else Mode.BLEND,
        prompt_tokens=len(request.prompt_token_ids),
        layout=_layout(request.prompt_token_ids, [] if part is None else part.pieces),
        reason=reuse.reasons.get(request.request_id),
    )


def _layout(tokens: list[int], pieces: list[Piece]) -> list[Placement]:
    """The prompt without gap or overlap: what is reused, and what is between."""
    placed = []
    at = 0
    for piece in pieces:
        if piece.start > at:
            placed.append(Placement(segment=None, start=at, tokens=piece.start - at))
        at = piece.start + piece.tokens
        placed.append(
            Placement(
                segment=key((), tokens[piece.start : at]),
                start=piece.start,
                tokens=piece.tokens,
                source=Source.REUSE,
            )
        )
    if at < len(tokens):
        placed.append(Placement(segment=None, start=at, tokens=len(tokens) - at))
    return placed


def _check_place(membership: Membership) -> None:
    for name, value, least in (
        ("round", membership.round, 0),
        ("n_agents", membership.n_agents, 1),
        ("deadline_ms", membership.deadline_ms, 1),
    ):
        if value is not None and value < least:
            raise BadRequest(
                f"td_round.{name}: {value}, expected an integer of at least {least}",
                field=f"td_round.{name}",
            )
    for name, text in (("sim", sim_of(membership.sim)), ("agent", membership.agent)):
        if not 1 <= len(text) <= 256:
            raise BadRequest(
                f"td_round.{name}: {len(text)} characters, expected 1 to 256",
                field=f"td_round.{name}",
            )
