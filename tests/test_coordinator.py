"""Rounds, run: one unit when all is well, and each member for itself when something is not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from td_serve.config import CoordinatorSettings, DispatchSettings, ReuseSettings
from td_serve.conversations import writes
from td_serve.coordinator import RoundCoordinator
from td_serve.errors import (
    BadRequest,
    EngineFailure,
    RequestError,
    RoundConflict,
    Unavailable,
)
from td_serve.types import (
    AgentId,
    Alone,
    ConversationKey,
    GenerateRequest,
    Membership,
    Mode,
    SessionId,
)
from tests.fakes import Clock, FakeEngines, Pin, Point, Recorder, make_request, settle, texts_of

VILLAGE = SessionId("village")
GONE = Unavailable("the replica has gone")
WRONG = BadRequest("the prompt is too long", field="prompt")
BROKEN = EngineFailure("the engine failed")
SOON_MS = 2
"""A deadline that passes while a test waits for it."""


class Rig:
    """A coordinator on fake engines."""

    def __init__(self, **tunables: Any) -> None:
        self.engines = FakeEngines()
        self.recorder = Recorder()
        self.clock = Clock()
        self.coordinator = RoundCoordinator(
            self.engines, settings_of(**tunables), self.recorder.metrics, self.clock
        )

    async def play(self, request: GenerateRequest) -> str:
        """One member's whole answer."""
        text = ""
        deltas = self.coordinator.play(request)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                text += "".join(choice.text for choice in delta.choices)
        return text

    def start(self, request: GenerateRequest) -> "asyncio.Task[str]":
        return asyncio.create_task(self.play(request))

    async def play_all(self, *requests: GenerateRequest) -> list[str | BaseException]:
        tasks = [self.start(request) for request in requests]
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    def members(self) -> list[list[str]]:
        """The agents of every round that was prefilled as one unit."""
        return [[member.agent for member in work.plan.members] for work in self.engines.rounds]

    async def end(self) -> None:
        """Nothing is held, nothing is under way, and nothing runs on."""
        await self.coordinator.drain()
        self.coordinator.check_integrity()
        self.engines.check_integrity()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def settings_of(**tunables: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        dispatch=DispatchSettings(attempts=2, retry_backoff_s=0.0), **tunables
    )


NAMES = (AgentId("cyd"), AgentId("ada"), AgentId("bo"))


def trio(number: int = 0, **fields: object) -> list[GenerateRequest]:
    return [make_request(name, number=number, n_agents=3, **fields) for name in NAMES]  # type: ignore[arg-type]


def answer(request: GenerateRequest) -> str:
    return "".join(texts_of(request))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.coordinator.drain()
    rig.coordinator.check_integrity()
    rig.engines.check_integrity()


# ------------------------------------------------------------------------------------ one unit


async def test_a_full_round_is_prefilled_once_as_one_unit(rig: Rig) -> None:
    requests = trio()
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.engines.calls == {"prefill_round": 1, "decode": 3}
    (work,) = rig.engines.rounds
    assert rig.members() == [["ada", "bo", "cyd"]]
    assert [request.request_id for request in work.requests] == [
        member.request_id for member in work.plan.members
    ]
    assert all(member.mode is Mode.EXACT for member in work.plan.members)
    assert work.plan.absent == 0
    assert set(rig.engines.pins.values()) == {Pin.READ}
    assert rig.recorder.values["td_round_members"] == [3]
    assert len(rig.recorder.values["td_round_duration_seconds"]) == 1
    await rig.end()


async def test_members_of_a_pass_and_those_who_are_in_none_are_told_apart() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none"))
    said = [100, 101, 102, 103]
    whole, ada, bo = (
        msgspec.structs.replace(
            request, prompt_token_ids=[number, *said, 200 + number], cuts=cuts, hand_over=True
        )
        for number, (request, cuts) in enumerate(zip(trio(), ([], [1, 5], [1, 5]), strict=True))
    )
    await rig.play_all(whole, ada, bo)
    (work,) = rig.engines.rounds
    modes = {member.agent: (member.mode, member.reason) for member in work.plan.members}
    assert modes == {
        "ada": (Mode.BLEND, None),
        "bo": (Mode.BLEND, None),
        "cyd": (Mode.EXACT, Alone.ONE_SEGMENT),
    }
    (spec,) = work.passes
    assert [member.request_id for member in spec.members] == [ada.request_id, bo.request_id]
    counted = {name: sum(rig.recorder.values[name]) for name in rig.recorder.values}
    assert {name: count for name, count in counted.items() if "alone" in name and count} == {
        "td_round_members_alone_one_segment_total": 1
    }
    await rig.end()


def listening(number: int) -> list[GenerateRequest]:
    """A round's members, who have all read the same after a beginning of their own."""
    heard = [100 * number + place for place in range(4)]
    return [
        msgspec.structs.replace(one, prompt_token_ids=[at, *heard, 200 + at], cuts=[1, 5])
        for at, one in enumerate(trio(number))
    ]


async def test_what_a_round_puts_out_is_told_as_it_comes_for_the_next_one() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none"))
    first, second = listening(1), listening(2)
    await rig.play_all(*first)
    assert rig.engines.forecasts == [], "nothing was said before"
    slow = next(one for one in second if "/cyd/" in one.request_id)
    gate = rig.engines.hold(Point.OUTPUT, slow.request_id)
    tasks = [rig.start(request) for request in second]
    await gate.reached.wait()
    await settle()
    early = rig.engines.forecasts[-1]
    gate.opened.set()
    await asyncio.gather(*tasks)
    await rig.end()
    late = rig.engines.forecasts[-1]
    said = {one.request_id.split("/")[2]: answer(one) for one in (*first, *second)}
    before = {one.request_id.split("/")[2]: answer(one) for one in first}
    assert {one.before: one.now for one in late.said} == {
        before[agent]: said[agent] for agent in before
    }
    assert {one.before: one.now for one in early.said} == {
        before[agent]: said[agent] if agent != "cyd" else None for agent in before
    }
    (spec,) = rig.engines.rounds[1].passes
    assert (late.sim, late.last, late.grows) == (VILLAGE, spec.canonical, False)


async def test_a_transcript_is_told_to_grow_and_an_engine_that_is_lost_changes_nothing() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none"))
    rig.engines.fail(Point.PREPARE, VILLAGE, GONE, always=True)
    for number in range(3):
        members = listening(1)
        if number == 2:
            members = [
                msgspec.structs.replace(
                    one,
                    prompt_token_ids=[*one.prompt_token_ids[:5], 300, 301, 302, 303, 9],
                    cuts=[1, 5, 9],
                )
                for one in members
            ]
        requests = [
            msgspec.structs.replace(
                member, request_id=request.request_id, membership=request.membership
            )
            for member, request in zip(members, trio(number), strict=True)
        ]
        assert await rig.play_all(*requests) == [answer(request) for request in requests]
    await rig.end()
    assert [one.grows for one in rig.engines.forecasts] == [False, True]


async def test_a_replica_that_stands_still_is_told_no_longer_than_a_request_waits() -> None:
    """Rounds go on meanwhile; nothing of it stays."""
    patience = DispatchSettings(attempts=2, retry_backoff_s=0.0, patience_s=0.01)
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none"))
    rig.coordinator.configure(
        CoordinatorSettings(reuse=ReuseSettings(mode="blend", rule="none"), dispatch=patience)
    )
    gate = rig.engines.hold(Point.PREPARE, VILLAGE)
    for number in (1, 2, 3):
        await rig.play_all(*listening(number))
    await gate.reached.wait()
    await rig.end()
    assert not gate.opened.is_set()
    assert len(rig.engines.rounds) == 3


async def test_nothing_is_told_where_it_is_not_wanted() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none", ahead=False))
    for number in (1, 2):
        await rig.play_all(*listening(number))
    assert rig.engines.forecasts == []
    await rig.end()


PUT_OUT = [*range(1, 31)]
"""Every member's tokens."""


def quoting(number: int) -> list[GenerateRequest]:
    """Members of a round that read what was said in the one before."""
    return [
        msgspec.structs.replace(
            one,
            prompt_token_ids=[1000 + at, *PUT_OUT, 2000 + at],
            cuts=[1, 1 + len(PUT_OUT)],
            cache_salt="salt",
        )
        for at, one in enumerate(trio(number))
    ]


@pytest.mark.parametrize("base", ["author", "canonical"])
async def test_what_was_said_is_read_from_whoever_has_decoded_it(base: Any) -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none", base=base))
    rig.engines.outputs = len(PUT_OUT)
    first, second = quoting(0), quoting(1)
    await rig.play_all(*first)
    await rig.play_all(*second)
    (spec,) = rig.engines.rounds[1].passes
    turns = rig.engines.rounds[1].turns
    if base == "canonical":
        assert (spec.written, turns) == ([], {})
        assert rig.coordinator.forget(VILLAGE)
        await rig.end()
        assert rig.engines.forgotten == []
        return
    (written,) = spec.written
    assert written.piece.tokens == len(PUT_OUT) - 1, "of the last token there is no KV"
    assert written.piece.start == len(first[0].prompt_token_ids)
    assert list(turns) == [written.name]
    assert rig.engines.forecasts == [], "there is nothing to be computed ahead"
    assert rig.coordinator.forget(VILLAGE)
    await rig.end()
    assert sorted(rig.engines.forgotten) == sorted(writes(VILLAGE, one) for one in NAMES)


async def test_who_forbids_it_leaves_nothing_for_others_to_read() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none", base="author"))
    rig.engines.outputs = len(PUT_OUT)
    for number in range(2):
        kept_out = [
            msgspec.structs.replace(
                one, membership=msgspec.structs.replace(one.membership, kept=False)
            )
            for one in quoting(number)
        ]
        await rig.play_all(*kept_out)
    assert [(spec.written, work.turns) for work in rig.engines.rounds for spec in work.passes] == [
        ([], {}),
        ([], {}),
    ]
    assert rig.coordinator.forget(VILLAGE)
    await rig.end()
    assert rig.engines.forgotten == []


async def test_a_turn_that_is_kept_otherwise_ends_what_was_kept_for_its_output_alone() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none", base="author"))
    await rig.play_all(*trio(0))
    in_chats = [
        msgspec.structs.replace(one, conversation=ConversationKey(f"chat-{one.request_id}"))
        for one in trio(1)
    ]
    await rig.play_all(*in_chats)
    await rig.coordinator.drain()
    assert sorted(rig.engines.forgotten) == sorted(writes(VILLAGE, one) for one in NAMES)
    assert rig.coordinator.forget(VILLAGE)
    await rig.end()
    assert len(rig.engines.forgotten) == len(NAMES), "what is a conversation's outlives the session"


async def test_a_session_that_has_to_go_leaves_nothing_kept() -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", base="author"), sessions_kept=1)
    await rig.play_all(*trio(0))
    other = Membership(sim=SessionId("town"), agent=AgentId("eve"), round=0, n_agents=1)
    await rig.play_all(msgspec.structs.replace(trio(1)[0], membership=other))
    await rig.end()
    assert sorted(rig.engines.forgotten) == sorted(writes(VILLAGE, one) for one in NAMES)


@pytest.mark.parametrize("whose", ["writes", "conversation"])
async def test_a_handle_stays_inside_and_a_conversations_own_outlives_the_session(
    whose: str,
) -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", base="author"))
    (request,) = trio()[:1]
    request = msgspec.structs.replace(
        request,
        membership=Membership(sim=VILLAGE, agent=AgentId("cyd"), round=0, n_agents=1),
        conversation=ConversationKey("its-own") if whose == "conversation" else None,
    )
    assert [one.handle async for one in rig.coordinator.play(request)] == [None] * 3
    rig.coordinator.forget(VILLAGE)
    await rig.end()
    assert rig.engines.forgotten == ([writes(VILLAGE, AgentId("cyd"))] if whose == "writes" else [])


@pytest.mark.parametrize("leaving", [1, 3])
async def test_a_member_that_leaves_while_its_round_is_planned_is_not_prefilled(
    leaving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(reuse=ReuseSettings(mode="blend", rule="none"))
    planning, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(plan: Callable[[], Any]) -> Any:
        planning.set()
        await go_on.wait()
        return plan()

    monkeypatch.setattr("td_serve.coordinator.asyncio.to_thread", slowly)
    said = [100, 101, 102, 103]
    requests = [
        msgspec.structs.replace(one, prompt_token_ids=[at, *said, 200 + at], cuts=[1, 5])
        for at, one in enumerate(trio())
    ]
    tasks = [rig.start(request) for request in requests]
    await planning.wait()
    for task in tasks[:leaving]:
        task.cancel()
    await asyncio.gather(*tasks[:leaving], return_exceptions=True)
    go_on.set()
    assert await asyncio.gather(*tasks[leaving:]) == [answer(one) for one in requests[leaving:]]
    here = sorted(request.request_id for request in requests[leaving:])
    assert [sorted(one.request_id for one in work.requests) for work in rig.engines.rounds] == (
        [here] if here else []
    )
    for work in rig.engines.rounds:
        assert sorted(one.request_id for spec in work.passes for one in spec.members) == here
    await rig.end()


async def test_nothing_is_prefilled_before_the_last_member_has_come(rig: Rig) -> None:
    first, second, third = trio()
    tasks = [rig.start(first), rig.start(second)]
    await settle()
    assert not rig.engines.calls
    tasks.append(rig.start(third))
    assert await asyncio.gather(*tasks) == [answer(r) for r in (first, second, third)]
    assert rig.members() == [["ada", "bo", "cyd"]]


async def test_a_member_streams_as_soon_as_its_own_prefill_is_ready(rig: Rig) -> None:
    requests = trio()  # prefilled in the order ada, bo, cyd
    gate = rig.engines.hold(Point.MEMBER, requests[0].request_id)
    tasks = [rig.start(request) for request in requests]
    await gate.reached.wait()
    await settle()
    assert [task.done() for task in tasks] == [False, True, True]
    gate.opened.set()
    assert await asyncio.gather(*tasks) == [answer(request) for request in requests]


async def test_members_that_cannot_be_handed_over_are_planned_and_prefill_nothing(
    rig: Rig,
) -> None:
    requests = [*trio()[:2], make_request("bo", n_agents=3, hand_over=False)]
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.members() == [["ada", "bo", "cyd"]]
    assert [r.request_id for r in rig.engines.rounds[0].requests] == [
        "village/0/ada/0",
        "village/0/cyd/0",
    ]
    assert rig.engines.calls == {"prefill_round": 1, "decode": 3}


async def test_a_round_of_members_without_prefill_asks_for_none(rig: Rig) -> None:
    requests = trio(hand_over=False)
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.engines.calls == {"decode": 3}


async def test_rounds_of_a_session_follow_each_other(rig: Rig) -> None:
    for number in range(3):
        requests = trio(number)
        assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert [work.plan.round for work in rig.engines.rounds] == [0, 1, 2]
    await rig.end()


async def test_two_sessions_do_not_mix(rig: Rig) -> None:
    both = [*trio(), *trio(sim="town")]
    assert await rig.play_all(*both) == [answer(request) for request in both]
    assert sorted(work.plan.sim for work in rig.engines.rounds) == ["town", "village"]
    assert rig.members() == [["ada", "bo", "cyd"]] * 2
    for sim in ("town", "village"):
        record = await rig.coordinator.record(SessionId(sim), 0, 0.0)
        assert all(output.text.startswith(f"<{sim}/0/") for output in record.outputs)
    assert rig.coordinator.forget(VILLAGE)
    assert (await rig.coordinator.record(SessionId("town"), 0, 0.0)).outputs
    await rig.end()


async def test_the_zero_change_path_gathers_by_its_window_and_then_by_who_is_known() -> None:
    rig = Rig(implicit_window_ms=SOON_MS)
    names = ("cyd", "ada", "bo")
    for _ in range(2):
        requests = [make_request(name, number=None) for name in names]
        assert await rig.play_all(*requests) == [answer(request) for request in requests]
        rig.coordinator.configure(settings_of(implicit_window_ms=600_000))
    assert rig.members() == [["ada", "bo", "cyd"]] * 2
    await rig.end()


async def test_a_request_without_a_place_is_refused(rig: Rig) -> None:
    request = msgspec.structs.replace(make_request("ada"), membership=None)
    with pytest.raises(BadRequest, match="td_round: missing"):
        await rig.play(request)


# ------------------------------------------------------------------------------------ deadlines


async def test_the_deadline_dispatches_who_is_there_and_counts_who_is_not(rig: Rig) -> None:
    requests = trio(deadline_ms=SOON_MS)[:2]
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.members() == [["ada", "cyd"]]
    assert rig.engines.rounds[0].plan.absent == 1
    await rig.end()


async def test_a_deadline_that_has_passed_by_the_clock_is_not_waited_for(rig: Rig) -> None:
    first, _, _ = trio(deadline_ms=600_000)
    task = rig.start(first)
    await asyncio.sleep(0)  # it has joined; its round's conductor has not begun
    rig.clock.now += 600.0
    assert await task == answer(first)
    assert rig.engines.rounds[0].plan.absent == 2


async def test_a_deadline_is_bounded_by_the_deployment() -> None:
    rig = Rig(max_deadline_ms=SOON_MS)
    first, _, _ = trio(deadline_ms=2**40)
    assert await rig.play(first) == answer(first)
    await rig.end()


async def test_the_deployments_deadline_counts_where_the_request_names_none() -> None:
    rig = Rig(deadline_ms=SOON_MS)
    first, _, _ = trio()
    assert await rig.play(first) == answer(first)
    await rig.end()


async def test_a_straggler_is_served_alone_and_recorded_in_its_place(rig: Rig) -> None:
    early, late = trio(deadline_ms=SOON_MS)[:2], trio()[2]
    await rig.play_all(*early)
    assert await rig.play(late) == answer(late)
    assert rig.members() == [["ada", "cyd"]]
    assert rig.engines.calls["prefill"] == 1
    assert rig.recorder.values["td_round_stragglers_total"] == [1]
    record = await rig.coordinator.record(VILLAGE, 0, 0.0)
    assert [output.agent for output in record.outputs] == ["ada", "bo", "cyd"]
    await rig.end()


# ------------------------------------------------------------------------------------ conflicts


async def test_a_refused_request_holds_nobody_up(rig: Rig) -> None:
    """It is the first to come, and none of the others waits for it."""
    first, *others = trio()
    assert first.membership is not None
    rig.coordinator.excuse(first.membership)
    assert await rig.play_all(*others) == [answer(request) for request in others]
    assert rig.members() == [["ada", "bo"]]
    await rig.end()


async def test_contradictions_are_refused_and_harm_nobody(rig: Rig) -> None:
    first, second, third = trio()
    tasks = [rig.start(first)]
    await settle()
    with pytest.raises(RoundConflict, match="'cyd' is already waiting in round 0"):
        await rig.play(first)
    with pytest.raises(RoundConflict, match=r"2, but round 0 .* was opened for 3 agents"):
        await rig.play(make_request("dov", n_agents=2))
    tasks += [rig.start(second), rig.start(third)]
    assert await asyncio.gather(*tasks) == [answer(r) for r in (first, second, third)]
    with pytest.raises(RoundConflict, match="'cyd' has already been served in round 0"):
        await rig.play(first)
    assert rig.members() == [["ada", "bo", "cyd"]]
    await rig.end()


async def test_an_agent_being_served_cannot_join_again(rig: Rig) -> None:
    request = make_request("ada", n_agents=1)
    gate = rig.engines.hold(Point.OUTPUT, request.request_id)
    task = rig.start(request)
    await gate.reached.wait()
    with pytest.raises(RoundConflict, match="'ada' is already being served in round 0"):
        await rig.play(request)
    gate.opened.set()
    assert await task == answer(request)


# ------------------------------------------------------------------------------------ cancellation


async def cancel(task: "asyncio.Task[str]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_member_that_goes_while_waiting_leaves_and_may_come_again(rig: Rig) -> None:
    first, second, third = trio()
    waiting = rig.start(first)
    await settle()
    await cancel(waiting)
    rig.coordinator.check_integrity()
    tasks = [rig.start(second), rig.start(third)]
    await settle()
    assert not rig.engines.calls, "who has left does not count"
    again = make_request("cyd", n_agents=3, attempt=1)
    tasks.append(rig.start(again))
    assert await asyncio.gather(*tasks) == [answer(r) for r in (second, third, again)]
    assert rig.members() == [["ada", "bo", "cyd"]]
    assert not rig.recorder.values["td_round_stragglers_total"]
    await rig.end()


async def test_a_round_that_all_have_left_ends_at_its_deadline(rig: Rig) -> None:
    task = rig.start(trio(deadline_ms=SOON_MS)[0])
    await asyncio.sleep(0)
    record = asyncio.create_task(rig.coordinator.record(VILLAGE, 0, 3600.0))
    await cancel(task)
    assert (await record).outputs == []
    assert not rig.engines.calls
    await rig.end()


async def test_a_member_that_goes_before_its_prefill_is_ready_has_it_released(rig: Rig) -> None:
    requests = trio()
    gate = rig.engines.hold(Point.MEMBER, requests[1].request_id)  # ada, prefilled first
    tasks = [rig.start(request) for request in requests]
    await gate.reached.wait()
    await cancel(tasks[1])
    gate.opened.set()
    others = list(await asyncio.gather(tasks[0], tasks[2]))
    assert others == [answer(requests[0]), answer(requests[2])]
    await rig.coordinator.drain()
    assert rig.engines.cancelled == [requests[1].request_id], "and was told to stop"
    assert sorted(pin.value for pin in rig.engines.pins.values()) == ["read", "read", "released"]
    await rig.end()


@pytest.mark.parametrize(
    ("point", "pin"),
    [(Point.ADMIT, Pin.RELEASED), (Point.READ, Pin.DROPPED), (Point.OUTPUT, Pin.READ)],
)
async def test_a_member_that_goes_while_served_keeps_nothing_and_may_come_alone(
    rig: Rig, point: Point, pin: Pin
) -> None:
    requests = trio()
    gate = rig.engines.hold(point, requests[1].request_id)
    tasks = [rig.start(request) for request in requests]
    await gate.reached.wait()
    await cancel(tasks[1])
    others = list(await asyncio.gather(tasks[0], tasks[2]))
    assert others == [answer(requests[0]), answer(requests[2])]
    await rig.coordinator.drain()
    assert rig.engines.pins[0] is pin, "ada's is the first"
    again = make_request("ada", n_agents=3, attempt=1)
    assert await rig.play(again) == answer(again)
    assert len(rig.engines.rounds) == 1
    assert rig.recorder.values["td_round_stragglers_total"] == [1]
    await rig.end()


@pytest.mark.parametrize("turns", range(30))
async def test_a_member_that_goes_at_any_turn_takes_nothing_with_it(rig: Rig, turns: int) -> None:
    """Between handing it its prefill and its taking it, too."""
    requests = trio(deadline_ms=SOON_MS)
    tasks = [rig.start(request) for request in requests]
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [results[0], results[2]] == [answer(requests[0]), answer(requests[2])]
    assert results[1] == answer(requests[1]) or isinstance(results[1], asyncio.CancelledError)
    await rig.end()


async def test_a_member_that_stops_reading_counts_as_failed(rig: Rig) -> None:
    deltas = rig.coordinator.play(make_request("ada", n_agents=1))
    await anext(deltas)
    await deltas.aclose()
    assert (await rig.coordinator.record(VILLAGE, 0, 0.0)).outputs == []
    await rig.end()


# ------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("error", [GONE, BROKEN, WRONG], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("dies_at", [0, 1, 2])
async def test_a_prefill_that_dies_half_way_fails_no_member(
    rig: Rig, dies_at: int, error: RequestError
) -> None:
    requests = trio()
    in_order = sorted(request.request_id for request in requests)
    rig.engines.fail(Point.ROUND, in_order[dies_at], error)
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.engines.calls["prefill_round"] == 1
    assert rig.engines.calls["prefill"] == 3 - dies_at
    await rig.end()


async def test_a_bad_member_fails_alone(rig: Rig) -> None:
    requests = trio()
    bad = requests[1].request_id
    rig.engines.fail(Point.MEMBER, bad, WRONG)
    rig.engines.fail(Point.PREFILL, bad, WRONG)
    results = await rig.play_all(*requests)
    assert results == [answer(requests[0]), WRONG, answer(requests[2])]
    assert rig.engines.calls["prefill"] == 1
    record = await rig.coordinator.record(VILLAGE, 0, 0.0)
    assert [output.agent for output in record.outputs] == ["bo", "cyd"]
    await rig.end()


async def test_a_member_whose_prefill_failed_once_prefills_for_itself(rig: Rig) -> None:
    requests = trio()
    rig.engines.fail(Point.MEMBER, requests[1].request_id, GONE)
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.engines.calls["prefill"] == 1
    await rig.end()


async def test_a_decode_that_fails_before_its_first_output_is_tried_again(rig: Rig) -> None:
    requests = trio()
    rig.engines.fail(Point.ADMIT, requests[0].request_id, GONE)
    rig.engines.fail(Point.READ, requests[1].request_id, GONE)
    assert await rig.play_all(*requests) == [answer(request) for request in requests]
    assert rig.recorder.values["td_request_retries_total"] == [1, 1]
    await rig.end()


async def test_configure_reaches_the_dispatcher(rig: Rig) -> None:
    request = make_request("ada", n_agents=1)
    rig.engines.fail(Point.ADMIT, request.request_id, GONE, GONE, GONE)
    rig.coordinator.configure(
        CoordinatorSettings(dispatch=DispatchSettings(attempts=4, retry_backoff_s=0.0))
    )
    assert await rig.play(request) == answer(request)


# ------------------------------------------------------------------------------------ the record


async def test_the_record_has_what_was_put_out_in_the_one_order(rig: Rig) -> None:
    requests = trio()
    await rig.play_all(*requests)
    record = await rig.coordinator.record(VILLAGE, 0, 0.0)
    assert (record.sim, record.round) == (VILLAGE, 0)
    assert [(o.agent, o.text, o.token_ids) for o in record.outputs] == [
        (name, f"<village/0/{name}/0:0><village/0/{name}/0:1><village/0/{name}/0:2>", [1, 2, 3])
        for name in ("ada", "bo", "cyd")
    ]


async def test_given_positions_are_the_order_of_plan_and_record(rig: Rig) -> None:
    requests = [
        make_request(name, n_agents=3, position=position)
        for position, name in enumerate(("cyd", "ada", "bo"))
    ]
    await rig.play_all(*reversed(requests))
    assert rig.members() == [["cyd", "ada", "bo"]]
    record = await rig.coordinator.record(VILLAGE, 0, 0.0)
    assert [output.agent for output in record.outputs] == ["cyd", "ada", "bo"]


async def test_the_record_waits_until_the_members_are_done(rig: Rig) -> None:
    requests = trio()
    gate = rig.engines.hold(Point.OUTPUT, requests[0].request_id)
    tasks = [rig.start(request) for request in requests]
    await gate.reached.wait()
    record = asyncio.create_task(rig.coordinator.record(VILLAGE, 0, 3600.0))
    await settle()
    assert tasks[1].done()
    assert not record.done()
    gate.opened.set()
    assert [output.agent for output in (await record).outputs] == ["ada", "bo", "cyd"]
    await asyncio.gather(*tasks)


async def test_the_record_is_what_there_is_when_patience_ends(rig: Rig) -> None:
    requests = trio()
    gate = rig.engines.hold(Point.OUTPUT, requests[0].request_id)
    tasks = [rig.start(request) for request in requests]
    await gate.reached.wait()
    await settle()
    record = await rig.coordinator.record(VILLAGE, 0, 0.0)
    assert [output.agent for output in record.outputs] == ["ada", "bo"]
    gate.opened.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("sim", "number"), [("village", 1), ("town", 0)])
async def test_a_round_that_is_not_on_record_is_a_conflict(rig: Rig, sim: str, number: int) -> None:
    await rig.play(make_request("ada", n_agents=1))
    with pytest.raises(RoundConflict, match=rf"round {number} of sim '{sim}' .* `shared`"):
        await rig.coordinator.record(SessionId(sim), number, 3600.0)


async def test_old_rounds_are_forgotten_and_the_last_ones_kept() -> None:
    rig = Rig(rounds_kept=2)
    for number in range(5):
        await rig.play(make_request("ada", number=number, n_agents=1))
    for number in (0, 1):
        with pytest.raises(RoundConflict, match="not on record"):
            await rig.coordinator.record(VILLAGE, number, 0.0)
    for number in (3, 4):
        assert (await rig.coordinator.record(VILLAGE, number, 0.0)).outputs
    await rig.end()


async def test_forgetting_a_session_forgets_its_record(rig: Rig) -> None:
    assert not rig.coordinator.forget(VILLAGE)
    await rig.play(make_request("ada", n_agents=1))
    assert rig.coordinator.forget(VILLAGE)
    with pytest.raises(RoundConflict, match="not on record"):
        await rig.coordinator.record(VILLAGE, 0, 0.0)
    assert await rig.play(make_request("ada", n_agents=1)), "the round may be played anew"


async def test_a_session_with_a_round_under_way_cannot_be_forgotten(rig: Rig) -> None:
    request = make_request("ada", n_agents=1)
    gate = rig.engines.hold(Point.OUTPUT, request.request_id)
    task = rig.start(request)
    await gate.reached.wait()
    with pytest.raises(RoundConflict, match="'village' has a round under way"):
        rig.coordinator.forget(VILLAGE)
    gate.opened.set()
    assert await task == answer(request)
    assert rig.coordinator.forget(VILLAGE)


async def test_the_least_recently_used_session_goes_first() -> None:
    rig = Rig(sessions_kept=2)
    for sim, number in (("one", 0), ("two", 0), ("one", 1), ("three", 0)):
        await rig.play(make_request("ada", sim=sim, number=number, n_agents=1))
    forgotten = [rig.coordinator.forget(SessionId(sim)) for sim in ("one", "two", "three")]
    assert forgotten == [True, False, True]
    await rig.end()


async def test_a_session_with_a_round_under_way_stays_whatever_its_age() -> None:
    rig = Rig(sessions_kept=2)
    busy = make_request("ada", sim="busy", n_agents=1)
    gate = rig.engines.hold(Point.OUTPUT, busy.request_id)
    task = rig.start(busy)
    await gate.reached.wait()
    for sim in ("one", "two", "three"):
        await rig.play(make_request("ada", sim=sim, n_agents=1))
    # Room for two: the busy one and the last one played.
    for sim in ("one", "two"):
        assert not rig.coordinator.forget(SessionId(sim)), sim
    assert rig.coordinator.forget(SessionId("three"))
    gate.opened.set()
    assert await task == answer(busy)
    assert rig.coordinator.forget(SessionId("busy"))
    await rig.end()


# ------------------------------------------------------------------------------------ any round

faults = st.lists(
    st.tuples(
        st.sampled_from([p for p in Point if p is not Point.RELEASE]),
        st.sampled_from([GONE, GONE, WRONG, BROKEN]),
    ),
    max_size=2,
)
parts = st.lists(
    st.tuples(faults, st.none() | st.integers(0, 40), st.sampled_from([0, 0, 1, 5])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(members=parts, absent=st.sampled_from([0, 0, 0, 1]))
def test_whatever_befalls_a_round_nothing_stays_held(
    members: list[tuple[list[tuple[Point, RequestError]], int | None, int]], absent: int
) -> None:
    """Each member has its faults, goes away at some turn of the loop or not at all, and comes at
    once or a few turns later; some never come."""

    async def play() -> None:
        rig = Rig()
        requests = [
            make_request(
                f"agent {i}", n_agents=len(members) + absent, deadline_ms=SOON_MS, position=-i
            )
            for i in range(len(members))
        ]
        tasks: dict[int, asyncio.Task[str]] = {}
        for request, (errors, _, _) in zip(requests, members, strict=True):
            for point, error in errors:
                rig.engines.fail(point, request.request_id, error)
        for turn in range(50):
            for i, (_, gone_at, comes_at) in enumerate(members):
                if comes_at == turn:
                    tasks[i] = rig.start(requests[i])
                if gone_at == turn and i in tasks:
                    tasks[i].cancel()
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for i, result in zip(tasks, results, strict=True):
            errors, gone_at, _ = members[i]
            if not isinstance(result, BaseException):
                assert result == answer(requests[i])
            elif not isinstance(result, asyncio.CancelledError):
                assert isinstance(result, RequestError)
                assert errors, f"a member without faults failed: {result!r}"
            else:
                assert gone_at is not None
        assert len(rig.engines.rounds) <= 1
        dispatched = [member for work in rig.members() for member in work]
        assert len(dispatched) == len(set(dispatched))
        await rig.end()
        # Members that all went before their round was dispatched have left no round behind.
        if dispatched:
            record = await rig.coordinator.record(VILLAGE, 0, 0.0)
            served = [
                requests[i] for i, r in zip(tasks, results, strict=True) if isinstance(r, str)
            ]
            assert {o.text for o in record.outputs} == {answer(request) for request in served}
            assert rig.coordinator.forget(VILLAGE)

    asyncio.run(play())
