"""A supported in-memory stand-in for the engines, with accounts of everything it holds.

`FakeEngines` keeps `dispatch.Engines`' contract: a prefill pins a handover; the caller owns it
until `decode` has yielded ADMITTED, then the decode engine does, which reads it or drops it on
every path. Each pin goes one way, once; a second read or release is a fault. `check_integrity`
says whether anything is still held.

Every call passes named points. A test may `fail` a point (the call raises there) or `hold` it (the
call stands there until the gate opens); anything else takes one turn of the event loop. There are
no clocks and no sleeping, so a run is the same every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from td_serve.errors import RequestError
from td_serve.metrics import Meter, Metrics
from td_serve.types import (
    ADMITTED,
    AgentId,
    ChoiceDelta,
    ConversationKey,
    Delta,
    Epoch,
    Forecast,
    GenerateRequest,
    Handle,
    Handover,
    LeaseId,
    MemberHandover,
    Membership,
    ReplicaId,
    RequestId,
    RoundPrefill,
    SessionId,
)


class Point(enum.Enum):
    """Where a call can fail or stand, in the order in which a request passes them."""

    PREFILL = "prefill"
    """In `prefill`, before anything is pinned."""
    PINNED = "pinned"
    """In `prefill`, pinned and not returned yet."""
    ROUND = "round"
    """In `prefill_round`, before this member is ready: a failure kills the whole pass."""
    MEMBER = "member"
    """In `prefill_round`: a failure is this member's alone, and yielded."""
    ADMIT = "admit"
    """In `decode`, before ADMITTED: the handover is still the caller's."""
    READ = "read"
    """In `decode`, after ADMITTED, before the handover is read."""
    OUTPUT = "output"
    """In `decode`, before each output."""
    RELEASE = "release"
    PREPARE = "prepare"
    """In `prepare`, by the session's name."""


class Pin(enum.Enum):
    """What has become of a handover."""

    PINNED = "pinned"
    READ = "read"
    RELEASED = "released"
    DROPPED = "dropped"
    """Given up by the decode engine that owned it."""
    EXPIRED = "expired"


@dataclass
class Gate:
    """A point held: `reached` is set when a call stands there, which goes on once `opened` is."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngines:
    """One prefill and one decode engine. Outputs are a function of the request: see `texts_of`."""

    def __init__(self, outputs: int = 3) -> None:
        self.outputs = outputs
        self.outcome: dict[RequestId, dict[str, Any]] = {}
        """What the handovers of these requests say besides."""
        self.lease_s = 3600.0
        """What handovers say of their pin's life; nothing expires by itself here."""
        self.pins: dict[int, Pin] = {}
        self.calls: Counter[str] = Counter()
        """Calls begun, by method."""
        self.running: Counter[str] = Counter()
        """Calls under way, as `method request_id`."""
        self.rounds: list[RoundPrefill] = []
        """Every pass that `prefill_round` was asked for."""
        self.faults: list[str] = []
        """Breaches of the contract by the caller."""
        self.cancelled: list[RequestId] = []
        """Members that `cancel_member` was called for."""
        self.forgotten: list[ConversationKey] = []
        """What `forget` was called for."""
        self.forecasts: list[Forecast] = []
        """What `prepare` was told."""
        self._failures: dict[tuple[Point, str], deque[RequestError]] = defaultdict(deque)
        self._always: dict[tuple[Point, str], RequestError] = {}
        self._gates: dict[tuple[Point, str], Gate] = {}

    # ---------------------------------------------------------------- scripting

    def fail(
        self, point: Point, request_id: str, *errors: RequestError, always: bool = False
    ) -> None:
        """Raise `errors` there, one a visit; with `always`, the last one on every visit."""
        if always:
            self._always[point, request_id] = errors[-1]
        else:
            self._failures[point, request_id].extend(errors)

    def hold(self, point: Point, request_id: str) -> Gate:
        """Make calls stand at a point until the gate that this returns is opened."""
        return self._gates.setdefault((point, request_id), Gate())

    def expire_leases(self) -> None:
        """What nobody has read or released is freed, as the prefill engine's lease would."""
        for number in self.pinned:
            self.pins[number] = Pin.EXPIRED

    # ---------------------------------------------------------------- accounts

    @property
    def pinned(self) -> list[int]:
        return [number for number, pin in self.pins.items() if pin is Pin.PINNED]

    @property
    def under_way(self) -> list[str]:
        return sorted(self.running.elements())

    def check_integrity(self) -> None:
        """Nothing is pinned, no call is under way, the contract was kept. Raises AssertionError."""
        assert not self.faults, self.faults
        assert not self.under_way, f"calls under way: {self.under_way}"
        assert not self.pinned, f"pinned: {self.pinned} of {self.pins}"

    # ---------------------------------------------------------------- dispatch.Engines

    async def prefill(self, request: GenerateRequest, handle: Handle | None = None) -> Handover:
        with self._call("prefill", request.request_id):
            await self._pass(Point.PREFILL, request.request_id)
            handover = self._pin(request)
            try:
                await self._pass(Point.PINNED, request.request_id)
            except BaseException:
                self._move(handover, Pin.DROPPED)
                raise
            return handover

    async def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        self.rounds.append(work)
        planned = [member.request_id for member in work.plan.members]
        if [r for r in planned if r in {q.request_id for q in work.requests}] != [
            request.request_id for request in work.requests
        ]:
            self.faults.append(f"requests out of the plan's order: {work}")
        with self._call("prefill_round", f"{work.plan.sim}/{work.plan.round}"):
            for request in work.requests:
                await self._pass(Point.ROUND, request.request_id)
                try:
                    await self._pass(Point.MEMBER, request.request_id)
                except RequestError as error:
                    yield MemberHandover(request_id=request.request_id, error=error.message)
                else:
                    yield MemberHandover(request_id=request.request_id, handover=self._pin(request))

    async def prepare(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)
        with self._call("prepare", f"{forecast.sim}"):
            await self._pass(Point.PREPARE, forecast.sim)

    async def cancel_member(self, request_id: RequestId) -> None:
        """Books the call; the member's prefill goes on, as it does when the call comes late."""
        self.cancelled.append(request_id)
        await asyncio.sleep(0)

    async def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        with self._call("decode", request.request_id):
            await self._pass(Point.ADMIT, request.request_id)
            try:
                yield ADMITTED
                await self._pass(Point.READ, request.request_id)
                if handover is not None:
                    self._move(handover, Pin.READ)
                texts = texts_of(request, self.outputs)
                for number, text in enumerate(texts, 1):
                    await self._pass(Point.OUTPUT, request.request_id)
                    yield Delta(
                        choices=[ChoiceDelta(index=0, text=text, token_ids=[number])],
                        finished=number == len(texts),
                        cached_tokens=0 if handover is None else handover.cached_tokens,
                        handle=kept_turn(request, number) if number == len(texts) else None,
                    )
            finally:
                if handover is not None and self.pins[handover.kv["pin"]] is Pin.PINNED:
                    self._move(handover, Pin.DROPPED)

    async def release(self, handover: Handover) -> None:
        with self._call("release", handover.request_id):
            await self._pass(Point.RELEASE, handover.request_id)
            self._move(handover, Pin.RELEASED)

    async def forget(self, conversation: ConversationKey) -> bool:
        self.forgotten.append(conversation)
        return True

    # ---------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _call(self, method: str, request_id: str) -> Iterator[None]:
        self.calls[method] += 1
        self.running[f"{method} {request_id}"] += 1
        try:
            yield
        finally:
            self.running[f"{method} {request_id}"] -= 1

    async def _pass(self, point: Point, request_id: str) -> None:
        if (gate := self._gates.get((point, request_id))) is not None:
            gate.reached.set()
            await gate.opened.wait()
        else:
            await asyncio.sleep(0)
        if failures := self._failures.get((point, request_id)):
            raise failures.popleft()
        if (error := self._always.get((point, request_id))) is not None:
            raise error

    def _pin(self, request: GenerateRequest) -> Handover:
        number = len(self.pins)
        self.pins[number] = Pin.PINNED
        tokens = len(request.prompt_token_ids)
        return Handover(
            request_id=request.request_id,
            replica=ReplicaId("prefill-fake"),
            kv={"pin": number},
            lease_s=self.lease_s,
            prompt_tokens=tokens,
            cached_tokens=tokens // 2,
            **self.outcome.get(request.request_id, {}),
        )

    def _move(self, handover: Handover, to: Pin) -> None:
        number = handover.kv["pin"]
        if self.pins[number] is not Pin.PINNED:
            self.faults.append(f"pin {number}: {self.pins[number].value}, then {to.value}")
        self.pins[number] = to


def kept_turn(request: GenerateRequest, put_out: int) -> Handle | None:
    """The handle of a turn that is kept for others to read what it has put out."""
    if request.writes is None:
        return None
    return Handle(
        lease=LeaseId(f"lease-{request.request_id}"),
        conversation=request.conversation or request.writes,
        replica=ReplicaId("decode-fake"),
        epoch=Epoch(1),
        host="here",
        port=1,
        tp_size=1,
        block_size=16,
        block_ids=[[]],
        tokens=len(request.prompt_token_ids) + put_out - 1,
        digests=b"",
        tail=[],
        remaining_s=9.0,
    )


def texts_of(request: GenerateRequest, outputs: int = 3) -> list[str]:
    """What the fake puts out for a request, delta by delta."""
    return [f"<{request.request_id}:{number}>" for number in range(outputs)]


def make_request(
    agent: str,
    *,
    sim: str = "village",
    number: int | None = 0,
    n_agents: int | None = None,
    deadline_ms: int | None = None,
    position: int | None = None,
    prompt: Sequence[int] = (1, 2, 3, 4),
    attempt: int = 0,
    hand_over: bool = True,
) -> GenerateRequest:
    """A member's request. Its id is a function of who asks: `village/0/ada/0`."""
    return GenerateRequest(
        request_id=RequestId(f"{sim}/{number}/{agent}/{attempt}"),
        prompt_token_ids=list(prompt),
        sampling=b"",
        hand_over=hand_over,
        membership=Membership(
            sim=SessionId(sim),
            agent=AgentId(agent),
            round=number,
            n_agents=n_agents,
            deadline_ms=deadline_ms,
            position=position,
        ),
    )


async def settle() -> None:
    """Let every task run until each waits for something that is not merely its turn."""
    for _ in range(100):
        await asyncio.sleep(0)


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """Metrics that keep every value, by the metric's name."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.metrics = Metrics(
            Meter(
                counter=lambda name, text: _Instrument(self.values[name]),
                histogram=lambda name, text, bounds: _Instrument(self.values[name]),
                gauge=lambda name, text: _Instrument(self.values[name]),
            )
        )


class _Instrument:
    def __init__(self, values: list[float]) -> None:
        self._values = values

    def inc(self, value: float = 1.0) -> None:
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")  # as Ray's counters do
        self._values.append(value)

    def observe(self, value: float) -> None:
        self._values.append(value)

    def set(self, value: float) -> None:
        self._values.append(value)
