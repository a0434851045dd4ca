"""One request's way: what is pinned is read or released once, whatever ends the request where."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from td_serve.config import DispatchSettings
from td_serve.dispatch import Dispatcher
from td_serve.errors import BadRequest, EngineFailure, RequestError, Unavailable
from td_serve.types import Delta, GenerateRequest, Handover
from tests.fakes import FakeEngines, Gate, Pin, Point, Recorder, make_request, settle, texts_of

REQUEST = make_request("ada")
ID = REQUEST.request_id
GONE = Unavailable("the replica has gone")
WRONG = BadRequest("the prompt is too long", field="prompt")
BROKEN = EngineFailure("the engine failed")


class Rig:
    """A dispatcher on fake engines, and what its requests have put out."""

    def __init__(self, attempts: int = 3, backoff_s: float = 0.0) -> None:
        self.engines = FakeEngines()
        self.recorder = Recorder()
        self.dispatcher = Dispatcher(
            self.engines,
            DispatchSettings(attempts=attempts, retry_backoff_s=backoff_s),
            self.recorder.metrics,
        )
        self.texts: list[str] = []

    async def run(
        self, request: GenerateRequest = REQUEST, handover: Handover | None = None
    ) -> list[str]:
        """Serve a request to its end."""
        deltas = self.dispatcher.generate(request, handover)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                self.texts += [choice.text for choice in delta.choices]
        return self.texts

    async def prefills(self, count: int) -> None:
        """Let the event loop turn until so many prefills have begun."""
        for _ in range(1000):
            if self.engines.calls["prefill"] >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{self.engines.calls['prefill']} prefills, expected {count}")

    async def end(self, pins: list[Pin] | None = None) -> None:
        """Everything has been given back; `pins` is what became of each handover."""
        await self.dispatcher.drain()
        self.engines.check_integrity()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        if pins is not None:
            assert list(self.engines.pins.values()) == pins


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.dispatcher.drain()
    rig.engines.check_integrity()


# ------------------------------------------------------------------------------------ success


async def test_a_request_is_prefilled_handed_over_once_and_decoded(rig: Rig) -> None:
    assert await rig.run() == texts_of(REQUEST)
    assert rig.engines.calls == {"prefill": 1, "decode": 1}
    await rig.end([Pin.READ])
    assert rig.recorder.values["td_prompt_tokens_total"] == [4]
    assert rig.recorder.values["td_prefill_tokens_saved_total"] == [2]
    assert not rig.recorder.values["td_request_retries_total"]


async def test_the_sign_of_admission_is_not_the_clients_to_see(rig: Rig) -> None:
    deltas: list[Delta] = [delta async for delta in rig.dispatcher.generate(REQUEST)]
    assert all(delta.choices for delta in deltas)
    assert [delta.finished for delta in deltas] == [False, False, True]


async def test_a_prefill_that_is_done_is_taken_over(rig: Rig) -> None:
    handover = await rig.engines.prefill(REQUEST)
    assert await rig.run(handover=handover) == texts_of(REQUEST)
    assert rig.engines.calls["prefill"] == 1
    await rig.end([Pin.READ])


async def test_a_prompt_that_must_not_be_handed_over_is_left_to_the_decode_engine(
    rig: Rig,
) -> None:
    request = make_request("ada", hand_over=False)
    assert await rig.run(request) == texts_of(request)
    assert rig.engines.calls == {"decode": 1}


# ------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("point", "prefills", "pins"),
    [
        (Point.PREFILL, 3, [Pin.READ]),
        (Point.PINNED, 3, [Pin.DROPPED, Pin.DROPPED, Pin.READ]),
        (Point.ADMIT, 3, [Pin.RELEASED, Pin.RELEASED, Pin.READ]),
        (Point.READ, 3, [Pin.DROPPED, Pin.DROPPED, Pin.READ]),
        (Point.OUTPUT, 3, [Pin.READ, Pin.READ, Pin.READ]),
    ],
)
async def test_a_request_without_output_is_tried_again(
    rig: Rig, point: Point, prefills: int, pins: list[Pin]
) -> None:
    rig.engines.fail(point, ID, GONE, GONE)
    assert await rig.run() == texts_of(REQUEST)
    assert rig.engines.calls["prefill"] == prefills
    assert rig.recorder.values["td_request_retries_total"] == [1, 1]
    await rig.end(pins)


@pytest.mark.parametrize("point", [Point.PREFILL, Point.ADMIT, Point.READ, Point.OUTPUT])
async def test_attempts_are_counted_and_told(rig: Rig, point: Point) -> None:
    rig.engines.fail(point, ID, GONE, always=True)
    with pytest.raises(Unavailable, match=f"{ID} failed 3 times: the replica has gone"):
        await rig.run()
    assert rig.engines.calls["prefill"] == 3
    await rig.end()


async def test_a_handover_that_was_handed_in_is_not_used_twice(rig: Rig) -> None:
    handover = await rig.engines.prefill(REQUEST)
    rig.engines.fail(Point.ADMIT, ID, GONE)
    assert await rig.run(handover=handover) == texts_of(REQUEST)
    await rig.end([Pin.RELEASED, Pin.READ])


@pytest.mark.parametrize("outputs", [1, 2])
async def test_unavailable_in_mid_answer_is_an_engine_failure(rig: Rig, outputs: int) -> None:
    deltas = rig.dispatcher.generate(REQUEST)
    for number in range(outputs):
        delta = await anext(deltas)
        assert delta.choices[0].text == texts_of(REQUEST)[number]
    rig.engines.fail(Point.OUTPUT, ID, GONE)
    with pytest.raises(EngineFailure, match=f"request {ID} broke off in mid-answer: the replica"):
        await anext(deltas)
    assert rig.engines.calls["prefill"] == 1
    await rig.end([Pin.READ])


@pytest.mark.parametrize("error", [WRONG, BROKEN], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("point", [Point.PREFILL, Point.ADMIT, Point.READ, Point.OUTPUT])
async def test_what_trying_again_cannot_help_is_not_tried_again(
    rig: Rig, point: Point, error: RequestError
) -> None:
    rig.engines.fail(point, ID, error)
    with pytest.raises(type(error)) as caught:
        await rig.run()
    assert caught.value is error
    assert rig.engines.calls["prefill"] == 1
    assert not rig.recorder.values["td_request_retries_total"]
    await rig.end()


async def test_a_release_that_fails_is_left_to_the_lease(rig: Rig) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    rig.engines.fail(Point.RELEASE, ID, GONE)
    rig.engines.fail(Point.ADMIT, ID, WRONG)
    with pytest.raises(BadRequest):
        await rig.run()
    await rig.dispatcher.drain()
    assert len(rig.engines.pinned) == 1
    rig.engines.expire_leases()
    await rig.end([Pin.EXPIRED])
    gc.collect()  # a task whose error nobody took complains when it goes
    assert not complaints


async def test_fewer_attempts_under_way_change_nothing_for_requests_under_way(rig: Rig) -> None:
    """Neither a silent end (the answer would be empty) nor a retry too few."""
    gate = rig.engines.hold(Point.PREFILL, ID)
    rig.engines.fail(Point.PREFILL, ID, GONE, always=True)
    for attempts in (1, 9):
        task = asyncio.create_task(rig.run())
        await gate.reached.wait()
        rig.dispatcher.settings = DispatchSettings(attempts=attempts, retry_backoff_s=0.0)
        gate.opened.set()
        with pytest.raises(Unavailable, match=r"failed \d times"):
            await task
        gate.opened.clear()
        gate.reached.clear()
        rig.dispatcher.settings = DispatchSettings(attempts=3, retry_backoff_s=0.0)


async def test_drain_waits_for_releases_under_way(rig: Rig) -> None:
    gate = rig.engines.hold(Point.RELEASE, ID)
    rig.dispatcher.give_up(await rig.engines.prefill(REQUEST))
    drained = asyncio.create_task(rig.dispatcher.drain())
    await gate.reached.wait()
    await settle()
    assert not drained.done()
    gate.opened.set()
    await drained
    await rig.end([Pin.RELEASED])


# ------------------------------------------------------------------------------------ cancellation


@pytest.mark.parametrize(
    ("point", "pin"),
    [
        (Point.PREFILL, None),
        (Point.PINNED, Pin.DROPPED),
        (Point.ADMIT, Pin.RELEASED),
        (Point.READ, Pin.DROPPED),
        (Point.OUTPUT, Pin.READ),
    ],
)
async def test_cancelling_at_any_point_leaves_nothing(
    rig: Rig, point: Point, pin: Pin | None
) -> None:
    gate: Gate = rig.engines.hold(point, ID)
    task = asyncio.create_task(rig.run())
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.end([] if pin is None else [pin])


async def test_cancelling_between_two_attempts_leaves_nothing() -> None:
    rig = Rig(backoff_s=3600.0)
    rig.engines.fail(Point.ADMIT, ID, GONE)
    task = asyncio.create_task(rig.run())
    await settle()
    assert rig.recorder.values["td_request_retries_total"] == [1]
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engines.calls["prefill"] == 1
    await rig.end([Pin.RELEASED])


async def test_an_old_handover_is_not_decoded_from(rig: Rig) -> None:
    """Nobody takes the request in half of the lease: it is given up, and prefilled anew."""
    rig.engines.lease_s = 0.0
    gate = rig.engines.hold(Point.ADMIT, ID)
    task = asyncio.create_task(rig.run())
    await gate.reached.wait()
    await rig.prefills(3)
    rig.engines.lease_s = 3600.0
    gate.opened.set()
    assert await task == texts_of(REQUEST)
    given_up = len(rig.engines.pins) - 1
    assert given_up >= 2
    await rig.end([*[Pin.RELEASED] * given_up, Pin.READ])


async def test_waiting_for_a_decode_replica_is_no_attempt_but_has_an_end() -> None:
    rig = Rig(attempts=1)
    now = 0.0
    rig.dispatcher = Dispatcher(
        rig.engines,
        DispatchSettings(attempts=1, retry_backoff_s=0.0, patience_s=10.0),
        rig.recorder.metrics,
        clock=lambda: now,
    )
    rig.engines.lease_s = 0.0
    rig.engines.hold(Point.ADMIT, ID)
    task = asyncio.create_task(rig.run())
    await rig.prefills(5)
    assert not task.done()
    now = 11.0
    with pytest.raises(Unavailable, match=f"{ID}: no decode replica has taken it"):
        await task
    await rig.end()
    assert set(rig.engines.pins.values()) == {Pin.RELEASED}


@pytest.mark.parametrize("read", [0, 1, 2, 3])
async def test_a_client_that_stops_reading_ends_the_request(rig: Rig, read: int) -> None:
    deltas = rig.dispatcher.generate(REQUEST)
    for _ in range(read):
        await anext(deltas)
    await deltas.aclose()
    assert rig.engines.under_way == []
    await rig.end([Pin.READ] if read else [])


faults = st.lists(
    st.tuples(
        st.sampled_from(
            [Point.PREFILL, Point.PINNED, Point.ADMIT, Point.READ, Point.OUTPUT, Point.RELEASE]
        ),
        st.sampled_from([GONE, GONE, WRONG, BROKEN]),
    ),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(faults=faults, turns=st.integers(0, 40), handed_in=st.booleans())
def test_at_any_turn_and_with_any_faults_nothing_stays_pinned(
    faults: list[tuple[Point, RequestError]], turns: int, handed_in: bool
) -> None:
    """Cancelled after any number of turns of the loop: between all await points there are."""

    async def play() -> None:
        rig = Rig()
        handover = await rig.engines.prefill(REQUEST) if handed_in else None
        for point, error in faults:
            rig.engines.fail(point, ID, error)
        task = asyncio.create_task(rig.run(handover=handover))
        await asyncio.sleep(0)  # it has begun, and owns what it was handed
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, BaseException):
            assert result == texts_of(REQUEST)
        assert rig.texts == texts_of(REQUEST)[: len(rig.texts)]
        await rig.dispatcher.drain()
        if any(point is Point.RELEASE for point, _ in faults):
            rig.engines.expire_leases()  # a release that failed is the lease's
        await rig.end()

    asyncio.run(play())
