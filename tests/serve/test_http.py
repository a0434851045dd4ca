"""The HTTP side: what is refused how, what reaches the parts behind it, and who goes away.

The parts behind the application are small fakes of its Protocols; HTTP is driven through ASGI.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from td_serve.conversations import key
from td_serve.errors import BadRequest, EngineFailure, RequestError, RoundConflict, Unavailable
from td_serve.replies import JsonReply, Reply, StreamReply, error_reply
from td_serve.segments import SEPARATOR
from td_serve.serve.http import MAX_BODY_BYTES, make_http_app
from td_serve.tenants import Tenants
from td_serve.types import (
    AgentId,
    AgentOutput,
    ConversationKey,
    Epoch,
    Membership,
    Origin,
    ReplicaId,
    ReplicaState,
    RoundRecord,
    SessionId,
    TenantId,
)
from tests.fakes import settle

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
IMPLIED = "/sim/village/agent/ada"
MESSAGES = [{"role": "user", "content": "Hello."}]


class FakeFrontend:
    """Answers with what it was asked; an agent in `errors` fails, one in `holds` is kept waiting,
    and all are by `hold`."""

    chat_parameters = frozenset(["model", "messages", "max_tokens", "temperature", "stream"])

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], Membership | None]] = []
        self.conversations: list[ConversationKey | None] = []
        self.tenants: list[TenantId] = []
        self.errors: dict[str, RequestError] = {}
        self.hold: asyncio.Event | None = None
        self.holds: dict[str, asyncio.Event] = {}
        self.began = asyncio.Event()
        self.cancelled = 0
        self.events_closed = asyncio.Event()

    async def chat(self, body: dict[str, Any], origin: Origin) -> Reply:
        return await self._answer("chat", body, origin)

    async def complete(self, body: dict[str, Any], origin: Origin) -> Reply:
        return await self._answer("complete", body, origin)

    async def models(self) -> JsonReply:
        return JsonReply(200, {"object": "list", "data": [{"id": "m"}]})

    async def _answer(self, kind: str, body: dict[str, Any], origin: Origin) -> Reply:
        membership = origin.membership
        self.asked.append((kind, body, membership))
        self.conversations.append(origin.conversation)
        self.tenants.append(origin.tenant)
        self.began.set()
        agent = membership.agent if membership is not None else ""
        try:
            if (hold := self.holds.get(agent, self.hold)) is not None:
                await hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if agent in self.errors:
            return error_reply(self.errors[agent])
        if body.get("stream"):
            return StreamReply(self._events(body.get("endless", False)))
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        return JsonReply(200, {"said": f"{agent} é", "usage": usage})

    async def _events(self, endless: bool) -> AsyncGenerator[str, None]:
        try:
            yield 'data: {"n": 1}\n\n'
            while endless:
                await asyncio.sleep(0)
                yield 'data: {"n": 2}\n\n'
            yield "data: [DONE]\n\n"
        finally:
            self.events_closed.set()


class FakeRounds:
    """Records of rounds, by session and number."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], RoundRecord] = {}
        self.excused: list[tuple[str, str]] = []
        self.patience: list[float] = []

    async def record(self, sim: SessionId, number: int, patience_s: float) -> RoundRecord:
        self.patience.append(patience_s)
        if (sim, number) not in self.records:
            raise RoundConflict(f"round: {number} of {sim!r} is not on record", field="round")
        return self.records[sim, number]

    async def excuse(self, membership: Membership) -> None:
        self.excused.append((membership.sim, membership.agent))

    async def forget(self, sim: SessionId) -> bool:
        gone = [place for place in self.records if place[0] == sim]
        for place in gone:
            del self.records[place]
        return bool(gone)


class FakeDirectory:
    """Replicas of the roles in `roles`."""

    def __init__(self) -> None:
        self.roles = ["prefill", "decode"]

    async def replicas(self) -> list[ReplicaState]:
        return [
            ReplicaState(
                replica=ReplicaId(f"{role}-0"),
                role=role,
                epoch=Epoch(1),
                host="127.0.0.1",
                nixl_port=20500,
                transports=["tcp"],
            )
            for role in self.roles
        ]


class FakeKept:
    """Conversations that are kept."""

    def __init__(self) -> None:
        self.conversations: set[ConversationKey] = set()

    async def forget(self, conversation: ConversationKey) -> bool:
        if conversation not in self.conversations:
            return False
        self.conversations.remove(conversation)
        return True


class Rig:
    """The application, the fakes behind it and a client in front."""

    def __init__(self, keys: Mapping[str, list[str]] | None = None) -> None:
        self.frontend = FakeFrontend()
        self.rounds = FakeRounds()
        self.directory = FakeDirectory()
        self.kept = FakeKept()
        self.app: FastAPI = make_http_app(
            self.frontend, self.rounds, self.directory, self.kept, Tenants(keys or {})
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://td"
        )

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error that comes back, once it is seen to have OpenAI's shape."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.client.post(path, content=content)
        assert answer.status_code == status, answer.text
        return check_error(answer)


def check_error(answer: httpx.Response) -> dict[str, Any]:
    """OpenAI's error shape, with the status repeated in it."""
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    assert error["type"].endswith("Error")
    assert error["message"]
    return error


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.client.aclose()


# ------------------------------------------------------------------------------------ OpenAI


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chat"), (TEXT, "complete")])
async def test_a_body_reaches_the_frontend_as_it_is(rig: Rig, path: str, kind: str) -> None:
    body = {"model": "m", "messages": MESSAGES, "temperature": 0.5, "unknown": [None]}
    answer = await rig.client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.json()["said"] == " é"
    assert rig.frontend.asked == [(kind, body, None)]


async def test_a_stream_is_server_sent_events(rig: Rig) -> None:
    answer = await rig.client.post(CHAT, json={"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == 'data: {"n": 1}\n\ndata: [DONE]\n\n'


async def test_a_frontends_refusal_keeps_its_status_and_shape(rig: Rig) -> None:
    rig.frontend.errors["ada"] = Unavailable("nobody there")
    error = await rig.refused(f"{IMPLIED}{CHAT}", {"messages": MESSAGES}, 503)
    assert error["message"] == "nobody there"


@pytest.mark.parametrize("prefix", ["", IMPLIED])
async def test_models_are_listed_on_both_paths(rig: Rig, prefix: str) -> None:
    answer = await rig.client.get(f"{prefix}/v1/models")
    assert answer.json()["data"] == [{"id": "m"}]


@pytest.mark.parametrize("path", [CHAT, TEXT, IMPLIED + CHAT, IMPLIED + TEXT, "/v1/rounds"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: not JSON"),
        (b"{", "body: not JSON"),
        (b"\xff", "body: not JSON"),
        (b'{"a": NaN}', "body: not JSON"),
        # Half a character: no other process, and no tokenizer, could take it.
        (b'{"a": "\\ud800 "}', "body: not JSON"),
        (b"[" * 100_000, "body: not JSON"),
        (b"[1]", "body: a list, expected a JSON object"),
        (b'"text"', "body: a str, expected a JSON object"),
        (b"null", "body: a NoneType, expected a JSON object"),
    ],
    ids=lambda part: repr(part[:12]) if isinstance(part, bytes) else "",
)
async def test_a_body_that_is_no_json_object_is_refused(
    rig: Rig, path: str, body: bytes, message: str
) -> None:
    error = await rig.refused(path, body)
    assert error["message"].startswith(message)
    assert error["type"] == "BadRequestError"
    assert not rig.frontend.asked


async def test_a_body_beyond_all_bounds_is_refused(rig: Rig) -> None:
    """Read up to the bound and no further: what comes after it is never asked for."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 2**20
            yield b" " * 2**20

    answer = await rig.client.post(CHAT, content=endless())
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == f"body: more than {2**26} bytes, which is the most"
    assert sent <= MAX_BODY_BYTES + 2**21


# ------------------------------------------------------------------------------------ td_round

PLACE = {"sim": "village", "round": 3, "agent": "ada", "n_agents": 2}


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chat"), (TEXT, "complete")])
async def test_td_round_becomes_the_membership(rig: Rig, path: str, kind: str) -> None:
    body = {"messages": MESSAGES, "td_round": {**PLACE, "deadline_ms": 50}}
    assert (await rig.client.post(path, json=body)).status_code == 200
    assert rig.frontend.asked == [
        (
            kind,
            {"messages": MESSAGES},
            Membership(
                sim=SessionId("village"),
                round=3,
                agent=AgentId("ada"),
                n_agents=2,
                deadline_ms=50,
            ),
        )
    ]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sim", ""),
        ("sim", "s" * 257),
        ("sim", 1),
        ("round", -1),
        ("round", "1"),
        ("round", 1.5),
        ("round", None),
        ("round", 2**64),
        ("agent", ""),
        ("agent", "a" * 257),
        ("agent", None),
        ("n_agents", 0),
        ("n_agents", "2"),
        ("n_agents", 2**64),
        ("deadline_ms", 0),
        ("deadline_ms", "1"),
        ("deadline_ms", 2**64),
    ],
)
async def test_each_field_of_td_round_is_checked(
    rig: Rig, path: str, field: str, value: object
) -> None:
    error = await rig.refused(path, {"td_round": {**PLACE, field: value}})
    assert error["param"] == f"td_round.{field}"
    assert error["message"].startswith(f"td_round.{field}: Expected ")
    assert error["type"] == "BadRequestError"
    assert not rig.frontend.asked


@pytest.mark.parametrize("field", list(PLACE))
async def test_td_round_must_be_whole(rig: Rig, field: str) -> None:
    place = {name: value for name, value in PLACE.items() if name != field}
    error = await rig.refused(CHAT, {"td_round": place})
    assert error["param"] == "td_round"
    assert f"missing required field `{field}`" in error["message"]


@pytest.mark.parametrize("value", [[], "round 3", 3, {**PLACE, "agents": 2}])
async def test_td_round_must_be_that_object_and_nothing_else(rig: Rig, value: object) -> None:
    error = await rig.refused(CHAT, {"td_round": value})
    if isinstance(value, dict):
        assert error["param"] == "td_round.agents"
        assert "unknown key 'agents', did you mean 'agent'?" in error["message"]
    else:
        assert error["param"] == "td_round"
        assert error["message"].startswith("td_round: ")


async def test_what_is_nearly_td_round_is_refused(rig: Rig) -> None:
    for path in (CHAT, f"/sim/village/agent/ada{CHAT}"):
        error = await rig.refused(path, {"td_rounds": PLACE})
        assert error["param"] == "td_rounds"
        assert "did you mean 'td_round'?" in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (BadRequest("b", field="messages"), 400, "BadRequestError"),
        (RoundConflict("c", field="td_round.agent"), 409, "ConflictError"),
        (EngineFailure("e"), 500, "InternalServerErrorError"),
        (Unavailable("u"), 503, "ServiceUnavailableError"),
    ],
)
async def test_errors_of_ours_have_their_status_and_openais_shape(
    rig: Rig, error: RequestError, status: int, name: str
) -> None:
    rig.frontend.errors["ada"] = error
    told = await rig.refused(CHAT, {"td_round": PLACE}, status)
    assert told == {
        "message": error.message,
        "type": name,
        "param": error.field,
        "code": status,
    }


# ------------------------------------------------------------------------------------ implied path


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chat"), (TEXT, "complete")])
async def test_the_path_says_who_it_is(rig: Rig, path: str, kind: str) -> None:
    await rig.client.post(f"/sim/my%20village/agent/%C3%A9va{path}", json={"messages": MESSAGES})
    membership = Membership(sim=SessionId("my village"), agent=AgentId("éva"))
    assert rig.frontend.asked == [(kind, {"messages": MESSAGES}, membership)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_path_alone_may_say_who_it_is(rig: Rig, path: str) -> None:
    error = await rig.refused(f"{IMPLIED}{path}", {"messages": MESSAGES, "td_round": PLACE})
    assert error["param"] == "td_round"
    assert error["message"] == "td_round: the path already names the agent"
    assert not rig.frontend.asked


# ------------------------------------------------------------------------------------ /v1/rounds

ROUND: dict[str, Any] = {
    "model": "m",
    "sim": "village",
    "round": 1,
    "preamble": "A village.",
    "agents": [
        {"agent": "bo", "system": "You are Bo.", "task": "Go on."},
        {"agent": "ada", "system": "You are Ada.", "task": "Go on."},
    ],
    "shared": [{"agent": "bo", "text": "Bo spoke."}, {"agent": "ada", "text": ""}],
    "completion": {"max_tokens": 2},
}
SUMS = {
    "shared_complete": True,
    "object": "round",
    "sim": "village",
    "round": 1,
    "agents": 2,
    "failed": 0,
    "shared": ["bo"],
    "usage": {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
}


def cut(*segments: str) -> str:
    """What a message says, cut into its segments."""
    return SEPARATOR + SEPARATOR.join(segments) + SEPARATOR


async def test_a_round_asks_once_for_each_agent_in_its_place(rig: Rig) -> None:
    await rig.client.post("/v1/rounds", json={**ROUND, "stream": False, "deadline_ms": 70})

    def place(one: tuple[str, dict[str, Any], Membership | None]) -> int:
        assert one[2] is not None
        assert one[2].position is not None
        return one[2].position

    asked = sorted(rig.frontend.asked, key=place)
    assert [membership for _, _, membership in asked] == [
        Membership(
            sim=SessionId("village"),
            agent=AgentId(name),
            round=1,
            n_agents=2,
            deadline_ms=70,
            position=position,
        )
        for position, name in enumerate(("bo", "ada"))
    ]
    for (kind, body, _), name in zip(asked, ("Bo", "Ada"), strict=True):
        assert kind == "chat"
        assert body == {
            "model": "m",
            "max_tokens": 2,
            "messages": [
                {"role": "system", "content": cut("A village.\n\n", f"You are {name}.")},
                {"role": "user", "content": cut("Bo spoke.\n\n", "Go on.")},
            ],
        }


async def test_a_round_comes_as_one_object(rig: Rig) -> None:
    answer = await rig.client.post("/v1/rounds", json={**ROUND, "stream": False})
    assert answer.status_code == 200
    body = answer.json()
    results = {one["agent"]: one["response"]["said"] for one in body.pop("results")}
    assert results == {"ada": "ada é", "bo": "bo é"}
    assert body == SUMS


async def test_a_round_streams_each_agent_and_then_its_sums(rig: Rig) -> None:
    answer = await rig.client.post("/v1/rounds", json=ROUND)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {part["agent"] for part in parts[:-1]} == {"ada", "bo"}
    assert parts[-1] == SUMS


@pytest.mark.parametrize("stream", [True, False])
async def test_an_agent_that_fails_is_told_and_fails_alone(rig: Rig, stream: bool) -> None:
    rig.frontend.errors["ada"] = EngineFailure("broke off")
    answer = await rig.client.post("/v1/rounds", json={**ROUND, "stream": stream})
    assert answer.status_code == 200
    if stream:
        *parts, sums = [
            json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]
        ]
    else:
        sums = answer.json()
        parts = sums["results"]
    by_agent = {part["agent"]: part for part in parts}
    assert by_agent["bo"]["response"]["said"] == "bo é"
    assert by_agent["ada"]["error"]["message"] == "broke off"
    assert by_agent["ada"]["error"]["code"] == 500
    assert (sums["agents"], sums["failed"]) == (2, 1)
    assert sums["usage"]["total_tokens"] == 12


async def test_the_first_round_shares_nothing_and_asks_for_no_record(rig: Rig) -> None:
    body = {**ROUND, "round": 0, "stream": False}
    del body["shared"]
    answer = await rig.client.post("/v1/rounds", json=body)
    assert answer.json()["shared"] == []
    assert rig.rounds.patience == []


@pytest.mark.parametrize(("deadline_ms", "patience_s"), [(None, 60.0), (1500, 1.5)])
async def test_a_later_round_shares_the_last_ones_record(
    rig: Rig, deadline_ms: int | None, patience_s: float
) -> None:
    rig.rounds.records["village", 0] = RoundRecord(
        sim=SessionId("village"),
        round=0,
        outputs=[AgentOutput(agent=AgentId("cyd"), text="Cyd spoke.")],
    )
    body = {**ROUND, "stream": False, "shared": None, "deadline_ms": deadline_ms}
    answer = await rig.client.post("/v1/rounds", json=body)
    assert answer.json()["shared"] == ["cyd"]
    assert rig.rounds.patience == [patience_s]
    for _, asked, _ in rig.frontend.asked:
        assert asked["messages"][1]["content"] == cut("Cyd spoke.\n\n", "Go on.")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_round_without_the_last_ones_record_is_a_conflict(rig: Rig, stream: bool) -> None:
    error = await rig.refused("/v1/rounds", {**ROUND, "stream": stream, "shared": None}, 409)
    assert error["param"] == "round"
    assert error["type"] == "ConflictError"
    assert not rig.frontend.asked


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"rond": 1}, "rond", "unknown key 'rond', did you mean 'round'?"),
        (
            {"agents": [{"agent": "ada", "taks": ""}]},
            "agents[0].taks",
            "unknown key 'taks', did you mean 'task'?",
        ),
        (
            {"temperature": 0},
            "temperature",
            "a parameter of chat completions goes into `completion`",
        ),
        ({"completion": {"max_token": 1}}, "completion.max_token", "did you mean 'max_tokens'?"),
        ({"agents": []}, "agents", "length >= 1"),
        ({"agents": [{"agent": "ada"}, {"agent": "ada"}]}, "agents", "'ada' stands 2 times"),
        ({"agents": [{"agent": ""}]}, "agents[0].agent", "length >= 1"),
        ({"agents": "ada"}, "agents", "Expected `array`"),
        ({"agents": [{"agent": "mute"}], "shared": [], "preamble": ""}, "agents", "'mute' has no"),
        ({"completion": {"model": "other"}}, "completion.model", "set by the server"),
        ({"completion": {"stream": True}}, "completion.stream", "set by the server"),
        ({"completion": {"td_round": {}}}, "completion.td_round", "set by the server"),
        ({"completion": []}, "completion", "Expected `object`"),
        ({"model": None}, "model", "Expected `str`"),
        ({"sim": ""}, "sim", "length >= 1"),
        ({"round": -1}, "round", ">= 0"),
        ({"round": 2**64}, "round", "Expected `int`"),
        (
            {"layout": "shared_frist"},
            "layout",
            "'shared_frist', did you mean 'shared_first'? expected one of history_first, shared",
        ),
        ({"stream": "yes"}, "stream", "Expected `bool`"),
        ({"deadline_ms": 0}, "deadline_ms", ">= 1"),
        ({"shared": [{"agent": "a", "text": 1}]}, "shared[0].text", "Expected `str`"),
    ],
    ids=lambda part: json.dumps(part)[:40] if isinstance(part, dict) else "",
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_wrong_round_is_refused_with_the_place(
    rig: Rig, change: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    error = await rig.refused("/v1/rounds", {**ROUND, "stream": stream, **change})
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "BadRequestError"
    assert not rig.frontend.asked


# ------------------------------------------------------------------------------------ the record


async def test_outputs_on_record_can_be_read_and_forgotten(rig: Rig) -> None:
    rig.rounds.records["my village", 2] = RoundRecord(
        sim=SessionId("my village"),
        round=2,
        outputs=[AgentOutput(agent=AgentId("ada"), text="é", token_ids=[7])],
    )
    answer = await rig.client.get("/v1/rounds/my%20village/2")
    assert answer.status_code == 200
    assert answer.json() == {
        "type": "round-record",
        "sim": "my village",
        "round": 2,
        "outputs": [{"agent": "ada", "text": "é", "token_ids": [7]}],
        "complete": True,
    }
    assert rig.rounds.patience == [0.0], "who asks for the record does not wait"
    for deleted in (True, False):
        gone = await rig.client.delete("/v1/rounds/my%20village")
        assert gone.json() == {"sim": "my village", "deleted": deleted}
    error = check_error(await rig.client.get("/v1/rounds/my%20village/2"))
    assert (error["code"], error["param"]) == (404, "round")


@pytest.mark.parametrize("number", ["one", "-1", "1.5", "%C2%B2", "%D9%A3", "9" * 5000])
async def test_a_round_that_is_no_number_is_refused(rig: Rig, number: str) -> None:
    answer = await rig.client.get(f"/v1/rounds/village/{number}")
    assert answer.status_code == 400
    error = check_error(answer)
    assert error["param"] == "round"
    assert error["message"].endswith("expected an integer")


# ------------------------------------------------------------------------------------ who serves


async def test_replicas_are_listed(rig: Rig) -> None:
    answer = await rig.client.get("/v1/replicas")
    assert [one["role"] for one in answer.json()["replicas"]] == ["prefill", "decode"]
    assert answer.json()["replicas"][0]["transports"] == ["tcp"]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["prefill"], "no decode replica is registered"),
        (["decode", "decode"], "no prefill replica is registered"),
        ([], "no decode and no prefill replica is registered"),
    ],
)
async def test_health_names_the_role_that_is_missing(
    rig: Rig, roles: list[str], message: str
) -> None:
    rig.directory.roles = roles
    answer = await rig.client.get("/health")
    assert answer.status_code == 503
    assert check_error(answer)["message"] == message


async def test_health_is_well_with_both_roles(rig: Rig) -> None:
    answer = await rig.client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


# ------------------------------------------------------------------------------------ going away


class Caller:
    """A client at the ASGI level, which can go away."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.got_body = asyncio.Event()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"td"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        call: Callable[..., Awaitable[None]] = app
        self.call = asyncio.ensure_future(call(scope, self._receive, self._send))

    def go_away(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and message.get("body"):
            self.got_body.set()


@pytest.mark.parametrize("path", [CHAT, TEXT, IMPLIED + CHAT, IMPLIED + TEXT])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_its_request(
    rig: Rig, path: str, stream: bool
) -> None:
    rig.frontend.hold = asyncio.Event()
    caller = Caller(rig.app, path, {"messages": MESSAGES, "stream": stream})
    await rig.frontend.began.wait()
    assert not caller.call.done()
    caller.go_away()
    await caller.call
    assert rig.frontend.cancelled == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_every_agent_of_its_round(
    rig: Rig, stream: bool
) -> None:
    rig.frontend.hold = asyncio.Event()
    caller = Caller(rig.app, "/v1/rounds", {**ROUND, "stream": stream})
    await rig.frontend.began.wait()
    caller.go_away()
    await caller.call
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert rig.frontend.cancelled == 2


async def test_a_client_that_goes_away_in_mid_stream_closes_the_stream(rig: Rig) -> None:
    caller = Caller(rig.app, CHAT, {"messages": MESSAGES, "stream": True, "endless": True})
    await caller.got_body.wait()
    assert not rig.frontend.events_closed.is_set()
    caller.go_away()
    await caller.call
    await rig.frontend.events_closed.wait()


async def test_a_client_that_stays_gets_its_answer(rig: Rig) -> None:
    rig.frontend.hold = asyncio.Event()
    caller = Caller(rig.app, CHAT, {"messages": MESSAGES})
    await rig.frontend.began.wait()
    rig.frontend.hold.set()
    await caller.call
    assert caller.sent[0]["status"] == 200
    assert json.loads(caller.sent[1]["body"])["said"] == " é"
    assert rig.frontend.cancelled == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize(
    ("switch", "kept"), [({}, True), ({"bidirectional_kv_xfer": False}, False)]
)
async def test_of_a_member_that_forbids_it_nothing_is_kept(
    rig: Rig, switch: dict[str, Any], kept: bool
) -> None:
    await rig.client.post(CHAT, json={"messages": MESSAGES, "td_round": PLACE, **switch})
    await rig.client.post(f"{IMPLIED}{CHAT}", json={"messages": MESSAGES, **switch})
    memberships = [membership for _, _, membership in rig.frontend.asked]
    assert [one and one.kept for one in memberships] == [kept, kept]


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({}, {}, None),
        ({"x-session-id": "a"}, {"session_id": "b"}, "a"),
        ({"X-Claude-Code-Session-Id": "a", "session-id": "b"}, {}, "a"),
        ({"session-id": "b"}, {"session_id": "c"}, "b"),
        ({}, {"conversation_id": "c", "prompt_cache_key": "d"}, "c"),
        ({}, {"prompt_cache_key": "d", "bidirectional_kv_xfer": True}, "d"),
        ({"x-session-id": "a"}, {"bidirectional_kv_xfer": False}, None),
    ],
)
async def test_a_conversation_is_named_by_headers_then_by_the_body(
    rig: Rig, headers: dict[str, str], fields: dict[str, Any], named: str | None
) -> None:
    for path in (CHAT, f"{IMPLIED}{CHAT}"):
        answer = await rig.client.post(path, json={"messages": MESSAGES, **fields}, headers=headers)
        assert answer.status_code == 200
    wanted = None if named is None else key("", named)
    assert rig.frontend.conversations == [wanted, wanted]
    assert all("bidirectional_kv_xfer" not in body for _, body, _ in rig.frontend.asked)


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        ({"session_id": 7}, "session_id", "7, expected a string"),
        ({"session_id": ""}, "session_id", "0 characters, expected 1 to 512"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key", "513 characters"),
        ({"bidirectional_kv_xfer": "no"}, "bidirectional_kv_xfer", "'no', expected true or false"),
    ],
)
async def test_a_conversation_that_cannot_be_is_refused(
    rig: Rig, fields: dict[str, Any], field: str, expected: str
) -> None:
    error = await rig.refused(CHAT, {"messages": MESSAGES, **fields})
    assert error["param"] == field
    assert expected in error["message"]


async def test_a_conversation_can_be_deleted_whatever_its_name(rig: Rig) -> None:
    rig.kept.conversations.add(key("", "a/b c"))
    for deleted in (True, False):
        answer = await rig.client.delete("/v1/conversations/a%2Fb%20c")
        assert answer.json() == {"conversation": "a/b c", "deleted": deleted}


# ---------------------------------------------------------------- members that are refused


@pytest.mark.parametrize(
    ("error", "excused"),
    [
        (BadRequest("max_tokens: -1"), True),
        (RoundConflict("twice"), False),
        (Unavailable("no replica"), False),
        (EngineFailure("broke off"), False),
    ],
)
async def test_a_round_goes_on_without_a_member_whose_request_is_refused(
    rig: Rig, error: RequestError, excused: bool
) -> None:
    rig.frontend.errors["ada"] = error
    place = {"sim": "village", "round": 0, "agent": "ada", "n_agents": 2}
    for path, body in (
        (CHAT, {"messages": MESSAGES, "td_round": place}),
        (f"{IMPLIED}{TEXT}", {"prompt": "Hm"}),
        ("/v1/rounds", {**ROUND, "stream": False}),
    ):
        await rig.client.post(path, json=body)
    assert rig.rounds.excused == [("village", "ada")] * (3 if excused else 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_round_whose_members_all_fail_alike_fails_as_one(rig: Rig, stream: bool) -> None:
    for agent in ("ada", "bo"):
        rig.frontend.errors[agent] = RoundConflict("has already been served")
    answer = await rig.client.post("/v1/rounds", json={**ROUND, "stream": stream})
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert [part["error"]["code"] for part in answer.json()["results"]] == [409, 409]
    assert answer.json()["failed"] == 2
    rig.frontend.errors["bo"] = BadRequest("max_tokens: -1")
    answer = await rig.client.post("/v1/rounds", json={**ROUND, "stream": stream})
    assert answer.status_code == 200


async def test_a_stream_begins_with_the_first_answer_and_with_who_failed_before(rig: Rig) -> None:
    """Not with the failure alone, and without waiting for the others."""
    rig.frontend.errors["ada"] = RoundConflict("has already been served")
    holds = rig.frontend.holds = {agent: asyncio.Event() for agent in ("bo", "cyd")}
    agents = [*ROUND["agents"], {"agent": "cyd", "task": "Go on."}]
    caller = Caller(rig.app, "/v1/rounds", {**ROUND, "agents": agents})
    await settle()
    assert not caller.sent
    holds["bo"].set()
    await caller.got_body.wait()
    await settle()
    assert caller.sent[0]["status"] == 200
    events = [message["body"].decode() for message in caller.sent[1:]]
    assert [json.loads(one.removeprefix("data: "))["agent"] for one in events] == ["ada", "bo"]
    caller.go_away()
    await caller.call
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert rig.frontend.cancelled == 1


async def test_a_round_says_when_the_last_one_was_not_over(rig: Rig) -> None:
    rig.rounds.records["village", 1] = RoundRecord(
        sim=SessionId("village"), round=1, outputs=[], complete=False
    )
    body = {**ROUND, "round": 2, "stream": False, "preamble": "It rains.", "shared": None}
    answer = await rig.client.post("/v1/rounds", json=body)
    assert answer.json()["shared_complete"] is False


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("PUT", CHAT, 405), ("DELETE", "/health", 405)],
)
async def test_paths_and_methods_that_are_not_there_have_openais_shape_too(
    rig: Rig, method: str, path: str, status: int
) -> None:
    answer = await rig.client.request(method, path)
    assert answer.status_code == status
    assert f"{method} {path}" in check_error(answer)["message"]


async def test_a_simulations_name_may_hold_a_slash(rig: Rig) -> None:
    rig.rounds.records["a/b", 0] = RoundRecord(sim=SessionId("a/b"), round=0, outputs=[])
    assert (await rig.client.get("/v1/rounds/a%2Fb/0")).status_code == 200
    assert (await rig.client.delete("/v1/rounds/a%2Fb")).json()["deleted"]
    path = f"/sim/a%2Fb/agent/c%2Fd{CHAT}"
    assert (await rig.client.post(path, json={"messages": MESSAGES})).status_code == 200
    membership = rig.frontend.asked[-1][2]
    assert membership is not None
    assert (membership.sim, membership.agent) == ("a/b", "c/d")
