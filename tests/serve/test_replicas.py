"""Replicas: packed in, packed out, and a pulse that outlives its directory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from td_serve.collector import Session, plan_round
from td_serve.errors import BadRequest, RequestError, Unavailable
from td_serve.serve.replicas import EngineReplica
from td_serve.types import (
    ADMITTED,
    Delta,
    Epoch,
    GenerateRequest,
    Handover,
    MemberHandover,
    ReplicaId,
    ReplicaState,
    RequestId,
    RoundPrefill,
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
        self.dead: RequestError | None = None

    async def prefill(self, request: GenerateRequest) -> Handover:
        return await self.engines.prefill(request)

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        return self.engines.prefill_round(work)

    def cancel_member(self, request_id: RequestId) -> None:
        self.engines.cancelled.append(request_id)

    def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        return self.engines.decode(request, handover)

    async def release(self, handover: Handover) -> None:
        await self.engines.release(handover)

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

    def close(self) -> None:
        self.closed += 1


class FakeRegister:
    """A directory that answers as scripted, then stays with its last epoch."""

    def __init__(self, *answers: int | RequestError) -> None:
        self.answers = list(answers)
        self.states: list[ReplicaState] = []
        self.epoch = 0
        self.spent = asyncio.Event()
        """Set when all of the script has been answered."""

    async def __call__(self, state: ReplicaState) -> Epoch:
        self.states.append(state)
        if not self.answers:
            return Epoch(self.epoch)
        answer = self.answers.pop(0)
        if not self.answers:
            self.spent.set()
        if isinstance(answer, RequestError):
            raise answer
        self.epoch = answer
        return Epoch(answer)


class Rig:
    def __init__(self, *answers: int | RequestError) -> None:
        self.host = FakeHost()
        self.register = FakeRegister(*answers)
        self.recorder = Recorder()
        self.left = 0
        self.replica = EngineReplica(
            self.host, self.register, self.recorder.metrics, leave=self._leave
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
    await rig.register.spent.wait()
    await settle()
    rig.replica.close()
    assert rig.epochs == [5.0, 7.0], "told once for each directory"
    assert [state.running for state in rig.register.states] == [1, 2, 3], "always anew"


async def test_the_first_beat_comes_at_once_and_one_pulse_is_enough(rig: Rig) -> None:
    for _ in range(3):
        rig.replica.start_pulse()
    await settle()
    assert len(rig.register.states) == 1
    assert rig.epochs == [5.0]


async def test_a_health_check_starts_the_pulse_and_asks_the_engine(rig: Rig) -> None:
    await rig.replica.check_health()
    await settle()
    assert len(rig.register.states) == 1
    rig.host.dead = Unavailable("the engine has died")
    with pytest.raises(Unavailable, match="the engine has died"):
        await rig.replica.check_health()
    assert rig.left == 1


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
    assert not rig.register.states


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
    with pytest.raises(WireVersionError, match="version 2 from another process"):
        await rig.replica.prefill(b"\x00\x02" + pack(REQUEST)[2:])
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
