"""Replicas: packed in, packed out, and a pulse that outlives its directory."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from td_serve.collector import Session, plan_round
from td_serve.errors import BadRequest, RequestError, Unavailable
from td_serve.leases import End, LeaseCounts
from td_serve.serve.replicas import EngineReplica
from td_serve.types import (
    ADMITTED,
    AgentId,
    Canonical,
    ConversationKey,
    Delta,
    Epoch,
    Forecast,
    GenerateRequest,
    Handle,
    Handover,
    LeaseId,
    MemberHandover,
    MemberPass,
    MemberPlan,
    Mode,
    PassSpec,
    PassTokens,
    Read,
    ReaderId,
    Registered,
    ReplicaId,
    ReplicaState,
    RequestId,
    RoundPlan,
    RoundPrefill,
    Rule,
    RuleName,
    SegmentKey,
    SessionId,
    WireVersionError,
    pack,
    unpack,
)
from tests.fakes import FakeEngines, Point, Recorder, make_request, settle, texts_of

REQUEST = make_request("ada")


class FakeHost:
    """`FakeEngines` with a state of its own: how many times it was asked for it."""

    def __init__(self) -> None:
        self.engines = FakeEngines()
        self.asked = 0
        self.closed = 0
        self.drained = 0
        self.dead: RequestError | None = None
        self.refusal: str | None = None
        self.handles: list[Handle | None] = []
        """What was offered to prefills."""
        self.leases: dict[LeaseId, Handle] = {}
        """What is kept; a decode whose lease is `next_lease` adds it."""
        self.next_lease: Handle | None = None
        self.reads: list[Read] = []
        """Those for rounds as a whole."""
        self.ends: dict[End, int] = {}

    async def prefill(self, request: GenerateRequest, handle: Handle | None = None) -> Handover:
        self.handles.append(handle)
        return await self.engines.prefill(request)

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        return self.engines.prefill_round(work)

    async def prepare(self, forecast: Forecast) -> None:
        await self.engines.prepare(forecast)

    def cancel_member(self, request_id: RequestId) -> None:
        self.engines.cancelled.append(request_id)

    async def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        async with contextlib.aclosing(self.engines.decode(request, handover)) as deltas:
            async for delta in deltas:
                if delta.finished and (kept := self.next_lease) is not None:
                    self.leases[kept.lease] = kept
                    delta = msgspec.structs.replace(delta, handle=kept)
                yield delta

    async def release(self, handover: Handover) -> None:
        await self.engines.release(handover)

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        return handle.lease in self.leases

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        """Nothing is held here."""

    async def forget(self, conversation: ConversationKey) -> bool:
        return self.leases.pop(LeaseId(conversation), None) is not None

    async def end_lease(self, lease: LeaseId) -> None:
        self.leases.pop(lease, None)

    def take_reads(self) -> list[Read]:
        reads, self.reads = self.reads, []
        return reads

    async def lease_counts(self) -> LeaseCounts:
        live = dict.fromkeys(self.leases, 100.0)
        return LeaseCounts(live=live, blocks=0, held=0, unfreed=0, ends=self.ends)

    def state(self) -> ReplicaState:
        self.asked += 1
        return ReplicaState(
            replica=ReplicaId("prefill-0"),
            role="prefill",
            epoch=Epoch(1),
            host="127.0.0.1",
            nixl_port=20500,
            transports=["tcp"],
            running=self.asked,
        )

    async def check_health(self) -> None:
        if self.dead is not None:
            raise self.dead

    async def why_no_passes(self) -> str | None:
        return self.refusal

    async def drain(self) -> None:
        self.drained += 1

    def close(self) -> None:
        self.closed += 1


class FakeDirectory:
    """Answers as scripted, then stays with its last epoch."""

    def __init__(self, *answers: int | RequestError) -> None:
        self.answers = list(answers)
        self.states: list[ReplicaState] = []
        self.epoch = 0
        self.spent = asyncio.Event()
        """Set when all of the script has been answered."""
        self.kept: list[LeaseId] = []
        self.remaining: list[float] = []
        self.superseded: list[LeaseId] = []
        self.dropped: list[LeaseId] = []
        self.away: RequestError | None = None
        self.on_keep: Callable[[], Awaitable[None]] | None = None
        """What happens while the directory is being told."""
        self.told = asyncio.Event()

    async def keep(self, handle: Handle) -> None:
        if self.away is not None:
            raise self.away
        if self.on_keep is not None:
            await self.on_keep()
        self.kept.append(handle.lease)
        self.remaining.append(handle.remaining_s)
        self.told.set()

    async def drop(self, handles: list[Handle]) -> None:
        self.dropped += [handle.lease for handle in handles]

    async def register(self, state: ReplicaState) -> Registered:
        self.states.append(state)
        superseded, self.superseded = self.superseded, []
        if not self.answers:
            return Registered(epoch=Epoch(self.epoch), superseded=superseded)
        answer = self.answers.pop(0)
        if not self.answers:
            self.spent.set()
        if isinstance(answer, RequestError):
            raise answer
        self.epoch = answer
        return Registered(epoch=Epoch(answer), superseded=superseded)


class Rig:
    def __init__(self, *answers: int | RequestError) -> None:
        self.host = FakeHost()
        self.directory = FakeDirectory(*answers)
        self.recorder = Recorder()
        self.left = 0
        self.replica = EngineReplica(
            self.host, self.directory, self.recorder.metrics, leave=self._leave
        )

    def _leave(self) -> None:
        self.left += 1

    @property
    def epochs(self) -> list[float]:
        return self.recorder.values["td_directory_epoch"]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(5)
    yield rig
    rig.replica.close()
    rig.host.engines.check_integrity()


# ------------------------------------------------------------------------------------ the pulse


async def test_the_pulse_survives_its_directory_and_registers_with_the_next() -> None:
    """One beat a second: the script takes two."""
    rig = Rig(5, Unavailable("no directory"), 7)
    rig.replica.start_pulse()
    await rig.directory.spent.wait()
    await settle()
    rig.replica.close()
    assert rig.epochs == [5.0, 7.0], "told once for each directory"
    assert [state.running for state in rig.directory.states] == [1, 2, 3], "always anew"


async def test_the_first_beat_comes_at_once_and_one_pulse_is_enough(rig: Rig) -> None:
    for _ in range(3):
        rig.replica.start_pulse()
    await settle()
    assert len(rig.directory.states) == 1
    assert rig.epochs == [5.0]


async def test_a_health_check_starts_the_pulse_and_asks_the_engine(rig: Rig) -> None:
    await rig.replica.check_health()
    await settle()
    assert len(rig.directory.states) == 1
    rig.host.dead = Unavailable("the engine has died")
    with pytest.raises(Unavailable, match="the engine has died"):
        await rig.replica.check_health()
    assert rig.left == 1


async def test_that_why_no_passes_are_made_is_said_at_the_start_and_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.host.refusal = "NewModel: no passes over its layers"
    for _ in range(3):
        await rig.replica.check_health()
    await settle()
    assert rig.directory.states, "it serves all the same"
    said = [one.message for one in caplog.records if "one by one" in one.message]
    assert said == ["members of rounds are prefilled one by one: " + rig.host.refusal]


@pytest.mark.parametrize("point", [Point.PREFILL, Point.READ, Point.OUTPUT])
@pytest.mark.parametrize("dead", [False, True])
async def test_a_replica_leaves_with_its_engine_and_not_for_less(
    rig: Rig, point: Point, dead: bool
) -> None:
    """A call that fails asks for the engine's health at once."""
    error = Unavailable("the engine has died")
    rig.host.engines.fail(point, REQUEST.request_id, error)
    rig.host.dead = error if dead else None

    async def serve() -> None:
        handover = await rig.replica.prefill(pack(REQUEST))
        async for _ in rig.replica.decode(pack(REQUEST), handover):
            pass

    with pytest.raises(Unavailable):
        await serve()
    assert rig.left == int(dead)


async def test_closing_stops_the_engine_and_the_pulse() -> None:
    rig = Rig(5)
    rig.replica.start_pulse()
    await settle()
    rig.replica.close()
    await settle()
    assert rig.host.closed == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_replica_without_a_pulse_can_be_closed() -> None:
    rig = Rig()
    rig.replica.close()
    assert rig.host.closed == 1
    assert not rig.directory.states


# ------------------------------------------------------------------------------------ packed calls


async def test_calls_go_in_and_out_packed(rig: Rig) -> None:
    packed = await rig.replica.prefill(pack(REQUEST))
    handover = unpack(packed, Handover)
    assert handover.request_id == REQUEST.request_id
    deltas = [
        unpack(delta, Delta) async for delta in rig.replica.decode(pack(REQUEST), pack(handover))
    ]
    assert deltas[0] == ADMITTED
    assert [delta.choices[0].text for delta in deltas[1:]] == texts_of(REQUEST)


async def test_a_handover_can_be_given_up(rig: Rig) -> None:
    await rig.replica.release(await rig.replica.prefill(pack(REQUEST)))


async def test_a_prompt_can_be_decoded_without_a_handover(rig: Rig) -> None:
    deltas = [unpack(d, Delta) async for d in rig.replica.decode(pack(REQUEST), None)]
    assert len(deltas) == 4
    assert rig.host.engines.calls == {"decode": 1}


async def test_what_became_of_a_passes_members_is_counted_and_so_are_members_reads(
    rig: Rig,
) -> None:
    requests = [make_request(agent, n_agents=3) for agent in ("ada", "bo", "cyd")]
    spec = PassSpec(
        canonical=Canonical(key=SegmentKey("k"), token_ids=[], segments=[]),
        rule=Rule(name=RuleName.NONE),
        members=[
            MemberPass(request_id=one.request_id, history="h", token_ids=[], pieces=[])
            for one in requests[:2]
        ],
    )
    plan = RoundPlan(
        sim=SessionId("village"),
        round=0,
        members=[
            MemberPlan(
                agent=AgentId(one.request_id),
                request_id=one.request_id,
                mode=Mode.BLEND,
                prompt_tokens=0,
                layout=[],
            )
            for one in requests
        ],
    )
    read = Read(tokens=64, bytes=1000, seconds=0.1)
    rig.host.engines.outcome = {
        requests[0].request_id: {
            "cache_salt": "round:0",
            "blended": PassTokens(prompt=10, local=0, reused=7, selected=2, new=1, left=0.25),
        },
        requests[2].request_id: {"read": read},
    }
    work = RoundPrefill(plan=plan, requests=requests, passes=[spec])
    rig.host.reads = [Read(tokens=40, bytes=600, seconds=0.1)]
    for packed in [part async for part in rig.replica.prefill_round(pack(work))]:
        handover = unpack(packed, MemberHandover).handover
        assert handover is not None
        await rig.replica.release(pack(handover))
    counted = {name: sum(values) for name, values in rig.recorder.values.items()}
    assert counted["td_round_members_blended_total"] == 1
    tokens = {
        name: count
        for name, count in counted.items()
        if name.startswith("td_pass_tokens_") and name.endswith("_total")
    }
    assert tokens == {
        "td_pass_tokens_local_total": 0,
        "td_pass_tokens_reused_total": 7,
        "td_pass_tokens_selected_total": 2,
        "td_pass_tokens_new_total": 1,
    }
    assert rig.recorder.values["td_pass_deviation_left"] == [0.25]
    assert counted["td_round_members_not_blended_total"] == 1
    assert (counted["td_kv_reads_total"], counted["td_kv_read_tokens_total"]) == (2, 104)


async def test_a_rounds_members_come_packed_one_by_one(rig: Rig) -> None:
    session = Session(SessionId("village"), 1)
    for agent in ("bo", "ada"):
        request = make_request(agent, n_agents=2)
        assert request.membership is not None
        session.join(request.membership, request, 0.0, patience_s=1.0)
    members = session.rounds[0].close()
    work = RoundPrefill(
        plan=plan_round(session.rounds[0], members), requests=[m.request for m in members]
    )
    rig.host.engines.fail(Point.MEMBER, "village/0/bo/0", BadRequest("too long"))
    parts = [unpack(p, MemberHandover) async for p in rig.replica.prefill_round(pack(work))]
    assert rig.host.engines.rounds == [work]
    assert [part.request_id for part in parts] == ["village/0/ada/0", "village/0/bo/0"]
    assert parts[1].error == "too long"
    assert parts[1].handover is None
    assert parts[0].handover is not None
    await rig.replica.release(pack(parts[0].handover))


async def test_errors_of_the_engine_come_through(rig: Rig) -> None:
    rig.host.engines.fail(Point.PREFILL, REQUEST.request_id, Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await rig.replica.prefill(pack(REQUEST))


async def test_what_another_release_sends_never_reaches_the_engine(rig: Rig) -> None:
    with pytest.raises(WireVersionError, match="version 1 from another process"):
        await rig.replica.prefill(b"\x00\x01" + pack(REQUEST)[2:])
    with pytest.raises(WireVersionError, match="got a Delta, expected a Handover"):
        await rig.replica.release(pack(ADMITTED))
    assert not rig.host.engines.calls


async def test_closing_a_decode_closes_the_engines(rig: Rig) -> None:
    handover = await rig.replica.prefill(pack(REQUEST))
    deltas = rig.replica.decode(pack(REQUEST), handover)
    for _ in range(2):
        await anext(deltas)
    await deltas.aclose()
    assert rig.host.engines.under_way == []


async def test_a_decode_closed_at_its_admission_drops_the_handover(rig: Rig) -> None:
    handover = await rig.replica.prefill(pack(REQUEST))
    deltas = rig.replica.decode(pack(REQUEST), handover)
    assert unpack(await anext(deltas), Delta) == ADMITTED
    await deltas.aclose()
    assert rig.host.engines.pinned == []


# ------------------------------------------------------------------------------------ conversations


def a_handle(lease: str) -> Handle:
    return Handle(
        lease=LeaseId(lease),
        conversation=ConversationKey(lease),
        replica=ReplicaId("decode-0"),
        epoch=Epoch(1),
        host="127.0.0.1",
        port=20500,
        tp_size=1,
        block_size=4,
        block_ids=[[1]],
        tokens=3,
        digests=b"",
        tail=[1, 2, 3],
        remaining_s=480.0,
    )


async def decode_kept(rig: Rig, lease: str) -> list[Delta]:
    """A turn whose KV is kept as `lease`."""
    rig.host.next_lease = a_handle(lease)
    return [unpack(d, Delta) async for d in rig.replica.decode(pack(REQUEST), None)]


async def test_a_kept_turn_is_in_the_directory_before_its_last_delta_is_out(rig: Rig) -> None:
    rig.host.next_lease = a_handle("one")
    async for packed in rig.replica.decode(pack(REQUEST), None):
        delta = unpack(packed, Delta)
        assert delta.handle is None, "handles stay inside"
        assert rig.directory.kept == (["one"] if delta.finished else [])


async def test_a_new_directory_learns_of_all_that_is_kept_and_of_nothing_that_has_ended() -> None:
    rig = Rig(5, 7)
    for lease in ("one", "two"):
        await decode_kept(rig, lease)
    del rig.host.leases[LeaseId("one")]
    rig.directory.kept.clear()
    rig.replica.start_pulse()
    await rig.directory.spent.wait()
    await settle()
    rig.replica.close()
    assert rig.directory.dropped == ["one"]
    assert rig.directory.kept == ["two", "two"], "once for each directory"


async def test_a_lease_that_another_replica_has_a_newer_turn_of_ends(rig: Rig) -> None:
    for lease in ("one", "two"):
        await decode_kept(rig, lease)
    rig.directory.superseded = [LeaseId("one")]
    rig.replica.start_pulse()
    await settle()
    assert rig.host.leases.keys() == {"two"}
    assert rig.directory.dropped == ["one"]


async def test_a_new_directory_is_told_how_long_each_lease_lasts_now(rig: Rig) -> None:
    await decode_kept(rig, "one")
    rig.directory.remaining.clear()
    rig.replica.start_pulse()
    await settle()
    assert rig.directory.remaining == [100.0]


async def test_a_turn_that_ends_while_a_new_directory_is_told_is_not_told_over(rig: Rig) -> None:
    """What is told comes one by one; meanwhile the second conversation has a newer turn."""
    await decode_kept(rig, "one")
    await decode_kept(rig, "two")
    newer = msgspec.structs.replace(a_handle("three"), conversation=ConversationKey("two"))

    async def meanwhile() -> None:
        rig.directory.on_keep = None
        rig.host.next_lease = newer
        async for _ in rig.replica.decode(pack(REQUEST), None):
            pass

    rig.directory.kept.clear()
    rig.directory.on_keep = meanwhile
    rig.replica.start_pulse()
    await settle()
    assert rig.directory.kept == ["three", "one"], "and not 'two' after it"


async def test_ends_of_leases_are_counted_once_by_reason() -> None:
    rig = Rig(5, 5, 5)
    rig.host.ends = {End.RECLAIMED: 3, End.EXPIRED: 1}
    rig.replica.start_pulse()
    await settle()
    rig.host.ends = {End.RECLAIMED: 4, End.EXPIRED: 1}
    await rig.directory.spent.wait()
    await settle()
    rig.replica.close()
    counted = {why: sum(rig.recorder.values[f"td_kv_lease_{why.value}_total"]) for why in End}
    assert counted == {End.RECLAIMED: 4, End.EXPIRED: 1, End.SUPERSEDED: 0, End.DELETED: 0}


async def test_a_lease_that_the_directory_missed_is_told_by_the_next_beat(rig: Rig) -> None:
    rig.replica.start_pulse()
    await settle()
    rig.directory.away = Unavailable("no directory")
    await decode_kept(rig, "one")
    assert rig.directory.kept == []
    rig.directory.away = None
    async with asyncio.timeout(10):
        await rig.directory.told.wait()
    assert rig.directory.kept == ["one"]


async def test_a_handle_reaches_the_engine_and_a_hold_answers(rig: Rig) -> None:
    handle = a_handle("one")
    handover = await rig.replica.prefill(pack(REQUEST), pack(handle))
    await rig.replica.release(handover)
    assert rig.host.handles == [handle]
    assert not await rig.replica.hold(pack(handle), REQUEST.request_id, 1.0)
    rig.host.leases[handle.lease] = handle
    assert await rig.replica.hold(pack(handle), REQUEST.request_id, 1.0)
    await rig.replica.let_go(pack(handle), REQUEST.request_id)
    assert await rig.replica.forget(handle.conversation)
    assert not await rig.replica.forget(handle.conversation)
