"""Rounds: who is in, in which order, who is late, who is refused – for any sequence of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from td_serve.collector import Admission, Member, MemberState, Round, Session, plan_round
from td_serve.errors import BadRequest, RoundConflict
from td_serve.types import AgentId, AgentOutput, Membership, SessionId
from tests.fakes import make_request

SIM = SessionId("village")
AGENTS = ["ada", "bo", "cyd", "dov"]
agents = st.sampled_from(AGENTS)


def join(
    session: Session,
    agent: str,
    number: int | None = 0,
    n_agents: int | None = None,
    *,
    now: float = 0.0,
    patience_s: float = 10.0,
    position: int | None = None,
) -> Admission:
    request = make_request(agent, number=number, n_agents=n_agents, position=position)
    assert request.membership is not None
    return session.join(request.membership, request, now, patience_s=patience_s)


def end(member: Member, state: MemberState) -> None:
    member.state = state
    if state is MemberState.DONE:
        member.output = AgentOutput(agent=member.agent, text=f"{member.agent} spoke")


def names(members: list[Member]) -> list[str]:
    return [member.agent for member in members]


# ------------------------------------------------------------------------------------ any sequence


@dataclass
class Seen:
    """What the machine knows of a round by itself."""

    expected: int | None
    deadline_at: float
    implicit: bool
    dispatched: list[str] | None = None
    members: dict[str, Member] = field(default_factory=dict)


class RoundsOfASession(RuleBasedStateMachine):
    """Plays the coordinator, and keeps books of its own."""

    admitted = Bundle("admitted")

    @initialize(kept=st.integers(1, 3))
    def start(self, kept: int) -> None:
        self.now = 0.0
        self.kept = kept
        self.session = Session(SIM, kept)
        self.seen: dict[int, Seen] = {}
        self.known: set[str] = set()
        self.implicit: int | None = None
        self.forgotten: set[int] = set()

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        """The deadline closes what it should, as the coordinator does."""
        self.now += seconds
        for number, seen in list(self.seen.items()):
            if seen.dispatched is None and self.now >= seen.deadline_at:
                self.close(number)

    @rule(
        target=admitted,
        agent=agents,
        number=st.integers(0, 3),
        n_agents=st.none() | st.integers(1, 4),
        patience=st.integers(5, 20),
        position=st.none() | st.integers(0, 3),
    )
    def join_explicit(
        self,
        agent: str,
        number: int,
        n_agents: int | None,
        patience: int,
        position: int | None,
    ) -> object:
        seen = self.seen.get(number)
        try:
            admission = join(
                self.session,
                agent,
                number,
                n_agents,
                now=self.now,
                patience_s=patience,
                position=position,
            )
        except RoundConflict as error:
            assert seen is not None, "the first member of a round contradicts nobody"
            self.check_conflict(seen, agent, n_agents, error)
            return multiple()
        if seen is None:
            seen = self.opened(number, n_agents, self.now + patience)
        return self.check_admission(seen, agent, n_agents, admission)

    @rule(target=admitted, agent=agents, patience=st.integers(5, 20))
    def join_implicit(self, agent: str, patience: int) -> object:
        """The zero-change path never refuses and never serves alone."""
        seen = None if self.implicit is None else self.seen.get(self.implicit)
        fits = seen is not None and seen.dispatched is None and agent not in seen.members
        first = not self.known
        admission = join(self.session, agent, None, now=self.now, patience_s=patience)
        number = admission.round.number
        assert admission.alone is None
        if fits:
            assert number == self.implicit
            assert seen is not None
            if seen.expected is not None:
                seen.expected = len(self.known | {agent})
        else:
            assert number not in self.seen, "a new round, and not one that there has been"
            expected = None if first else len(self.known | {agent})
            seen = self.opened(number, expected, self.now + patience, implicit=True)
            self.implicit = number
        return self.check_admission(seen, agent, None, admission)

    @rule(admission=consumes(admitted))
    def leave(self, admission: Admission) -> None:
        """Its client went away: waiting, it is as if it had never come; served, it has failed."""
        seen = self.seen.get(admission.round.number)
        if seen is None or seen.members.get(admission.member.agent) is not admission.member:
            return
        waiting = admission.member.state is MemberState.WAITING
        self.session.leave(admission.round, admission.member)
        if waiting:
            del seen.members[admission.member.agent]
            assert admission.member.agent not in admission.round.members
            if not seen.members:  # a round that nobody is in has not been
                del self.seen[admission.round.number]
                if self.implicit == admission.round.number:
                    self.implicit = None
        else:
            assert admission.round.members[admission.member.agent] is admission.member
            if admission.member.state is MemberState.RUNNING:
                end(admission.member, MemberState.FAILED)

    @rule(admission=consumes(admitted), done=st.booleans())
    def finish(self, admission: Admission, done: bool) -> None:
        if admission.member.state is MemberState.RUNNING:
            end(admission.member, MemberState.DONE if done else MemberState.FAILED)

    @rule(number=st.integers(0, 6))
    def close(self, number: int) -> None:
        """What the coordinator does when a round is full or its deadline has passed."""
        round_ = self.session.rounds.get(number)
        if round_ is None:
            return
        seen = self.seen[number]
        dispatched = round_.close()
        if seen.dispatched is not None:
            assert dispatched == [], "a closed round dispatches nobody"
            return
        seen.dispatched = names(dispatched)
        assert seen.dispatched == sorted(
            seen.members,
            key=lambda a: (
                seen.members[a].position is None,
                seen.members[a].position or 0,
                a,
            ),
        )
        plan = plan_round(round_, dispatched)
        assert [member.agent for member in plan.members] == seen.dispatched
        assert plan.absent == (0 if seen.expected is None else seen.expected - len(seen.dispatched))

    def opened(
        self, number: int, expected: int | None, deadline_at: float, *, implicit: bool = False
    ) -> Seen:
        """A round has been opened: book it, and strike what the session may have forgotten."""
        assert self.session.rounds[number].deadline_at == deadline_at
        seen = self.seen[number] = Seen(expected, deadline_at, implicit)
        gone = self.seen.keys() - self.session.rounds.keys()
        for old in gone:
            assert self.is_finished(self.seen[old]), "an unfinished round was forgotten"
            del self.seen[old]
            self.forgotten.add(old)
        if number in self.forgotten:
            seen.dispatched = []  # it has been, and is forgotten: whoever comes now is late
        finished = [s for n, s in self.seen.items() if n != number and self.is_finished(s)]
        assert len(finished) <= self.kept
        assert not gone or len(finished) == self.kept, "more was forgotten than had to be"
        return seen

    def check_admission(
        self, seen: Seen, agent: str, n_agents: int | None, admission: Admission
    ) -> Admission:
        before = seen.members.get(agent)
        assert n_agents in (None, seen.expected)
        assert before is None or before.state is MemberState.FAILED, "twice in one round"
        where = f"round {admission.round.number} of sim 'village'"
        if before is not None:
            assert admission.alone == f"'{agent}' comes again after a failure in {where}"
        elif seen.dispatched is not None:
            assert admission.alone == f"{where} closed without '{agent}'"
        else:
            assert admission.alone is None
            assert seen.expected is None or len(seen.members) < seen.expected
        state = MemberState.WAITING if admission.alone is None else MemberState.RUNNING
        assert admission.member.state is state
        seen.members[agent] = admission.member
        self.known.add(agent)
        return admission

    def check_conflict(
        self, seen: Seen, agent: str, n_agents: int | None, error: RoundConflict
    ) -> None:
        before = seen.members.get(agent)
        if n_agents is not None and n_agents != seen.expected:
            assert error.field == "td_round.n_agents"
            assert f"td_round.n_agents: {n_agents}, but round" in error.message
        elif before is not None:
            verb = {
                MemberState.WAITING: "is already waiting in",
                MemberState.RUNNING: "is already being served in",
                MemberState.DONE: "has already been served in",
            }[before.state]
            assert error.field == "td_round.agent"
            assert f"'{agent}' {verb} round" in error.message
        else:
            assert seen.dispatched is None
            assert len(seen.members) == seen.expected
            assert error.field == "td_round.agent"
            assert f"'{agent}' is one too many" in error.message

    @staticmethod
    def is_finished(seen: Seen) -> bool:
        ended = (MemberState.DONE, MemberState.FAILED)
        return seen.dispatched is not None and all(m.state in ended for m in seen.members.values())

    @invariant()
    def the_books_agree(self) -> None:
        assert self.session.rounds.keys() == self.seen.keys()
        for number, seen in self.seen.items():
            round_ = self.session.rounds[number]
            assert round_.members == seen.members
            assert round_.expected == seen.expected
            assert round_.closed == (seen.dispatched is not None)
            assert round_.is_finished == self.is_finished(seen)
            if round_.closed:
                assert all(m.state is not MemberState.WAITING for m in round_.members.values())
                assert set(seen.dispatched or ()) <= set(round_.members)
            record = self.session.rounds[number].record()
            assert record is not None
            done = [m.agent for m in round_.in_order() if m.state is MemberState.DONE]
            assert [output.agent for output in record.outputs] == done
        assert self.session.is_idle == all(map(self.is_finished, self.seen.values()))


TestRoundsOfASession = RoundsOfASession.TestCase
TestRoundsOfASession.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ------------------------------------------------------------------------------------ order


@settings(deadline=None)
@given(
    members=st.dictionaries(
        st.text("abé", min_size=1, max_size=3), st.none() | st.integers(0, 3), min_size=1
    ),
    data=st.data(),
)
def test_the_order_is_the_same_for_every_order_of_arrival(
    members: dict[str, int | None], data: st.DataObject
) -> None:
    orders = []
    for arrivals in (list(members), data.draw(st.permutations(list(members)))):
        session = Session(SIM, 1)
        for agent in arrivals:
            join(session, agent, 0, len(members), position=members[agent])
        dispatched = session.rounds[0].close()
        assert sorted(names(dispatched)) == sorted(members)
        orders.append(names(dispatched))
    assert orders[0] == orders[1]


def test_given_positions_come_first_then_names() -> None:
    session = Session(SIM, 1)
    for agent, position in (("zed", 0), ("bo", None), ("ada", 1), ("abe", None)):
        join(session, agent, 0, 4, position=position)
    assert names(session.rounds[0].close()) == ["zed", "ada", "abe", "bo"]


def test_the_record_is_in_the_same_order_whoever_finished_first() -> None:
    session = Session(SIM, 1)
    for agent in ("cyd", "ada", "bo"):
        join(session, agent, 0, 3)
    for member in reversed(session.rounds[0].close()):
        end(member, MemberState.DONE)
    record = session.rounds[0].record()
    assert record is not None
    assert [output.agent for output in record.outputs] == ["ada", "bo", "cyd"]
    assert 1 not in session.rounds


# ------------------------------------------------------------------------------------ plans


@settings(deadline=None)
@given(
    prompts=st.dictionaries(
        st.sampled_from(AGENTS), st.lists(st.integers(0, 9), max_size=20), min_size=1
    ),
    absent=st.integers(0, 3),
)
def test_a_plan_covers_each_prompt_and_counts_the_absent(
    prompts: dict[str, list[int]], absent: int
) -> None:
    session = Session(SIM, 1)
    expected = len(prompts) + absent
    for agent, prompt in prompts.items():
        request = make_request(agent, n_agents=expected, prompt=prompt)
        assert request.membership is not None
        session.join(request.membership, request, 0.0, patience_s=1.0)
    round_ = session.rounds[0]
    plan = plan_round(round_, round_.close())
    assert (plan.sim, plan.round) == (SIM, 0)
    assert plan.absent == absent
    assert sorted(member.agent for member in plan.members) == sorted(prompts)
    for member in plan.members:
        assert member.prompt_tokens == len(prompts[member.agent])
        at = 0
        for placement in member.layout:
            assert placement.start == at
            assert placement.tokens > 0
            at += placement.tokens
        assert at == member.prompt_tokens


# ------------------------------------------------------------------------------------ single facts


def test_a_round_is_full_with_its_last_agent_and_not_before() -> None:
    session = Session(SIM, 1)
    assert not join(session, "ada", 0, 2).round.is_full
    assert join(session, "bo", 0, 2).round.is_full


def test_the_deadline_counts_from_the_first_member() -> None:
    session = Session(SIM, 1)
    join(session, "ada", 0, 2, now=100.0, patience_s=3.0)
    join(session, "bo", 0, 2, now=102.0, patience_s=50.0)
    assert session.rounds[0].opened_at == 100.0
    assert session.rounds[0].deadline_at == 103.0


def test_who_failed_alone_may_fail_and_come_again() -> None:
    session = Session(SIM, 1)
    join(session, "ada", 0, 1)
    session.rounds[0].close()
    for _ in range(3):
        end(session.rounds[0].members[AgentId("ada")], MemberState.FAILED)
        assert "after a failure in round 0" in (join(session, "ada", 0, 1).alone or "")
    end(session.rounds[0].members[AgentId("ada")], MemberState.DONE)
    with pytest.raises(RoundConflict, match="'ada' has already been served in round 0 of sim"):
        join(session, "ada", 0, 1)


def test_contradicting_the_number_of_agents_names_both_numbers() -> None:
    session = Session(SIM, 1)
    join(session, "ada", 4, 3)
    with pytest.raises(RoundConflict, match=r"2, but round 4 .* was opened for 3 agents") as caught:
        join(session, "bo", 4, 2)
    assert caught.value.field == "td_round.n_agents"
    assert names(session.rounds[4].close()) == ["ada"]


def test_an_implicit_round_is_full_when_every_known_agent_has_joined() -> None:
    session = Session(SIM, 1)
    first = [join(session, agent, None).round for agent in ("ada", "bo", "cyd")]
    assert {round_.number for round_ in first} == {0}
    assert not first[0].is_full, "nobody knows yet how many there are"
    first[0].close()
    second = [join(session, agent, None).round for agent in ("cyd", "ada", "bo")]
    assert {round_.number for round_ in second} == {1}
    assert second[0].is_full


def test_a_newcomer_to_an_implicit_round_takes_nobodys_place() -> None:
    session = Session(SIM, 1)
    for agent in ("ada", "bo"):
        join(session, agent, None)
    session.rounds[0].close()
    round_ = join(session, "ada", None).round
    assert join(session, "new", None).round is round_
    assert (round_.expected, len(round_.members)) == (3, 2), "bo is known, and not here yet"
    assert join(session, "bo", None).round is round_
    assert round_.is_full
    # Full, and not closed yet: one more newcomer is one more member, and is not refused.
    assert join(session, "newer", None).round is round_
    assert round_.is_full
    assert names(round_.close()) == ["ada", "bo", "new", "newer"]


def test_an_agent_that_is_in_the_open_implicit_round_opens_the_next() -> None:
    session = Session(SIM, 1)
    assert [join(session, "ada", None).round.number for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("membership", "message"),
    [
        (Membership(sim=SIM, agent=AgentId("a"), round=-1), "td_round.round: -1, .* at least 0"),
        (
            Membership(sim=SIM, agent=AgentId("a"), round=0, n_agents=0),
            "td_round.n_agents: 0, .* at least 1",
        ),
        (
            Membership(sim=SIM, agent=AgentId("a"), deadline_ms=0),
            "td_round.deadline_ms: 0, .* at least 1",
        ),
        (Membership(sim=SIM, agent=AgentId("")), "td_round.agent: 0 characters, expected 1 to"),
        (
            Membership(sim=SessionId("s" * 257), agent=AgentId("a")),
            "td_round.sim: 257 characters, expected 1 to 256",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_field(membership: Membership, message: str) -> None:
    session = Session(SIM, 1)
    with pytest.raises(BadRequest, match=message) as caught:
        session.join(membership, make_request("a"), 0.0, patience_s=1.0)
    assert caught.value.field == message.partition(":")[0]
    assert not session.rounds


def test_an_empty_round_plans_nothing() -> None:
    round_ = Round(sim=SIM, number=0, expected=2, opened_at=0.0, deadline_at=1.0)
    plan = plan_round(round_, round_.close())
    assert plan.members == []
    assert plan.absent == 2
    assert round_.is_finished


def test_a_round_does_not_wait_for_an_agent_whose_request_was_refused() -> None:
    session = Session(SIM, 2)
    place = Membership(sim=SIM, agent=AgentId("bo"), round=0, n_agents=2)
    opened = session.excuse(place, 0.0, patience_s=10.0)
    assert opened is not None
    assert not opened.is_full
    assert join(session, "ada", 0, 2).round is opened
    assert opened.is_full
    assert plan_round(opened, opened.close()).absent == 1
    assert session.excuse(place, 0.0, patience_s=10.0) is None, "it is closed"


def test_an_agent_that_comes_after_all_is_excused_no_more() -> None:
    session = Session(SIM, 2)
    place = Membership(sim=SIM, agent=AgentId("bo"), round=0, n_agents=2)
    session.excuse(place, 0.0, patience_s=10.0)
    admission = join(session, "bo", 0, 2)
    assert admission.alone is None
    assert not admission.round.is_full
    assert session.excuse(place, 0.0, patience_s=10.0) is None, "it is there"
    assert session.excuse(Membership(sim=SIM, agent=AgentId("x")), 0.0, patience_s=1.0) is None


def test_members_may_not_contradict_each_other_about_the_deadline() -> None:
    session = Session(SIM, 2)

    def join_with(agent: str, deadline_ms: int | None) -> Admission:
        request = make_request(agent, number=0, n_agents=4)
        place = Membership(
            sim=SIM, agent=AgentId(agent), round=0, n_agents=4, deadline_ms=deadline_ms
        )
        return session.join(place, request, 0.0, patience_s=1.0)

    join_with("ada", 500)
    join_with("bo", 500)
    join_with("cyd", None)
    with pytest.raises(RoundConflict, match=r"deadline_ms: 1, but round 0 .* opened with 500"):
        join_with("dov", 1)


def test_a_member_that_counts_agents_meets_those_that_do_not() -> None:
    session = Session(SIM, 2)
    join(session, "ada", None)
    with pytest.raises(RoundConflict, match="opened by agents that do not say how many they are"):
        join(session, "bo", 0, 2)
