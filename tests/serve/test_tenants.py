"""Tenants over HTTP: every route asks for a key, and what is one tenant's is no other's.

The coordinator is the real one, on engines in memory.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from td_serve.config import CoordinatorSettings
from td_serve.conversations import key
from td_serve.coordinator import RoundCoordinator
from td_serve.errors import RequestError
from td_serve.replies import JsonReply, Reply, error_reply
from td_serve.serve.http import make_http_app
from td_serve.tenants import Tenants, digest, session
from td_serve.types import (
    GenerateRequest,
    Membership,
    Origin,
    RequestId,
    RoundRecord,
    SessionId,
    TenantId,
)
from tests.fakes import FakeEngines, Recorder
from tests.serve.test_http import CHAT, IMPLIED, MESSAGES, ROUND, TEXT, Rig, check_error

ACME, BOLT = TenantId("acme"), TenantId("bolt")
KEYS = {ACME: ["td-acme-one", "td-acme-two"], BOLT: ["td-bolt"]}
DIGESTS = {tenant: [digest(one) for one in keys] for tenant, keys in KEYS.items()}


def bearer(tenant: TenantId, number: int = 0) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant][number]}"}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(DIGESTS)
    yield rig
    await rig.client.aclose()


# ---------------------------------------------------------------- who is let in

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"{IMPLIED}/v1/models"),
    ("POST", CHAT),
    ("POST", TEXT),
    ("POST", f"{IMPLIED}{CHAT}"),
    ("POST", f"{IMPLIED}{TEXT}"),
    ("POST", "/v1/rounds"),
    ("GET", "/v1/rounds/village/0"),
    ("DELETE", "/v1/rounds/village"),
    ("DELETE", "/v1/conversations/chat"),
    ("GET", "/v1/replicas"),
]
WRONG = [
    (None, "missing"),
    ("", "malformed"),
    ("Bearer", "malformed"),
    ("td-acme-one", "malformed"),
    ("Basic td-acme-one", "malformed"),
    ("Bearer td-acme-one,td-bolt", "malformed"),
    ("Bearer td-secret", "a key that is nobody's"),
]


def test_these_are_all_routes(rig: Rig) -> None:
    found = [(method, route.path) for route in rig.app.routes for method in route.methods]
    assert len(found) == len(ROUTES) + len([("GET", "/health")])


@pytest.mark.parametrize(("header", "what"), WRONG)
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_asks_for_a_key(
    rig: Rig,
    method: str,
    path: str,
    header: str | None,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before it reads the body; and what is said shows no key."""
    caplog.set_level(logging.DEBUG)
    read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield b"{}"

    headers = {} if header is None else {"authorization": header}
    answer = await rig.client.request(method, path, content=body(), headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert check_error(answer) == {
        "message": f"authorization: {what}, expected 'Bearer' and a tenant's API key",
        "type": "UnauthorizedError",
        "param": "authorization",
        "code": 401,
    }
    assert not read
    assert not rig.frontend.asked
    assert "td-" not in answer.text + caplog.text


async def test_health_asks_for_none(rig: Rig) -> None:
    assert (await rig.client.get("/health")).status_code == 200


@pytest.mark.parametrize(("tenant", "number"), [(ACME, 0), (ACME, 1), (BOLT, 0)])
async def test_each_of_a_tenants_keys_opens_every_door(
    rig: Rig, tenant: TenantId, number: int
) -> None:
    headers = bearer(tenant, number)
    for method, path in ROUTES:
        body = {"/v1/rounds": ROUND}.get(path, {"messages": MESSAGES})
        answer = await rig.client.request(method, path, json=body, headers=headers)
        assert answer.status_code == (404 if path == "/v1/rounds/village/0" else 200), path
    assert set(rig.frontend.tenants) == {tenant}


async def test_a_key_is_no_hindrance_where_none_is_asked_for() -> None:
    rig = Rig()
    answer = await rig.client.post(CHAT, json={"messages": MESSAGES}, headers=bearer(ACME))
    assert answer.status_code == 200
    assert rig.frontend.tenants == [""]


# ---------------------------------------------------------------- whose conversations


async def test_a_conversation_is_its_tenants(rig: Rig) -> None:
    for tenant in (ACME, BOLT):
        headers = {**bearer(tenant), "x-session-id": "chat"}
        await rig.client.post(CHAT, json={"messages": MESSAGES}, headers=headers)
    assert rig.frontend.conversations == [key(ACME, "chat"), key(BOLT, "chat")]
    rig.kept.conversations.add(key(ACME, "chat"))
    for tenant, deleted in ((BOLT, False), (ACME, True)):
        answer = await rig.client.delete("/v1/conversations/chat", headers=bearer(tenant))
        assert answer.json() == {"conversation": "chat", "deleted": deleted}


# ---------------------------------------------------------------- whose rounds


class Playing:
    """A frontend that has members of rounds served by the real coordinator."""

    chat_parameters = frozenset(["max_tokens"])

    def __init__(self) -> None:
        self.engines = FakeEngines()
        self.coordinator = RoundCoordinator(
            self.engines, CoordinatorSettings(), Recorder().metrics, lambda: 0.0
        )
        self.sims: list[SessionId] = []

    async def chat(self, body: dict[str, Any], origin: Origin) -> Reply:
        assert origin.membership is not None
        self.sims.append(origin.membership.sim)
        request = GenerateRequest(
            request_id=RequestId(f"{len(self.sims)}"),
            prompt_token_ids=[1, 2],
            sampling=b"",
            membership=origin.membership,
        )
        try:
            said = [one.text async for d in self.coordinator.play(request) for one in d.choices]
        except RequestError as error:
            return error_reply(error)
        usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        return JsonReply(
            200, {"said": "".join(said), "usage": {**usage, "prompt_tokens_details": None}}
        )

    complete = chat

    async def models(self) -> JsonReply:
        raise NotImplementedError

    # Rounds, as the ingress knows them.

    async def record(self, sim: SessionId, number: int, patience_s: float) -> RoundRecord:
        return await self.coordinator.record(sim, number, patience_s)

    async def forget(self, sim: SessionId) -> bool:
        return self.coordinator.forget(sim)

    async def excuse(self, membership: Membership) -> None:
        self.coordinator.excuse(membership)


class Stage:
    """Two tenants' clients, and one of the open server, before coordinators of their own."""

    def __init__(self, rig: Rig, digests: dict[TenantId, list[str]]) -> None:
        self.playing = Playing()
        app = make_http_app(self.playing, self.playing, rig.directory, rig.kept, Tenants(digests))
        self.acme, self.bolt = (
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://td", headers=bearer(tenant)
            )
            for tenant in (ACME, BOLT)
        )

    async def close(self) -> None:
        await self.acme.aclose()
        await self.bolt.aclose()
        await self.playing.coordinator.drain()
        self.playing.coordinator.check_integrity()
        self.playing.engines.check_integrity()


@pytest.fixture
async def stage(rig: Rig) -> AsyncIterator[Stage]:
    stage = Stage(rig, DIGESTS)
    yield stage
    await stage.close()


FIRST = {**ROUND, "round": 0, "shared": None, "stream": False}


async def test_a_round_is_its_tenants(stage: Stage) -> None:
    """It is read, handed on and forgotten by its tenant, for whom it has its own name."""
    acme, bolt = stage.acme, stage.bolt
    assert (await acme.post("/v1/rounds", json=FIRST)).json()["sim"] == "village"

    refused = await bolt.get("/v1/rounds/village/0")
    assert refused.status_code == 404
    nothing = "round: the outputs of round 0 of sim 'village' are not on record here"
    assert check_error(refused)["message"].startswith(nothing)
    second = {**FIRST, "round": 1}
    refused = await bolt.post("/v1/rounds", json=second)
    assert refused.status_code == 409
    assert check_error(refused)["message"].startswith(nothing)
    gone = (await bolt.delete("/v1/rounds/village")).json()
    assert gone == {"sim": "village", "deleted": False}

    record = (await acme.get("/v1/rounds/village/0")).json()
    assert (record["sim"], record["complete"]) == ("village", True)
    assert [one["agent"] for one in record["outputs"]] == ["bo", "ada"]
    answer = await acme.post("/v1/rounds", json=second)
    assert answer.json()["shared"] == ["bo", "ada"]
    gone = (await acme.delete("/v1/rounds/village")).json()
    assert gone == {"sim": "village", "deleted": True}


async def test_rounds_of_the_same_name_go_on_side_by_side(stage: Stage) -> None:
    """One waits for its own agents; the other's do not fill it, nor are they refused."""
    body = {"messages": MESSAGES}
    place = {"sim": "village", "round": 0, "n_agents": 2}

    def join(client: httpx.AsyncClient, agent: str) -> "asyncio.Task[httpx.Response]":
        posting = client.post(CHAT, json={**body, "td_round": {**place, "agent": agent}})
        return asyncio.ensure_future(posting)

    first = join(stage.acme, "ada")
    others = await asyncio.gather(join(stage.bolt, "ada"), join(stage.bolt, "bo"))
    assert [one.status_code for one in others] == [200, 200]
    assert not first.done()
    again = await join(stage.acme, "ada")
    assert check_error(again)["message"] == (
        "td_round.agent: 'ada' is already waiting in round 0 of sim 'village'"
    )
    busy = await stage.acme.delete("/v1/rounds/village")
    assert check_error(busy)["message"] == "sim: 'village' has a round under way"
    last = await join(stage.acme, "bo")
    assert (await first).status_code == last.status_code == 200


async def test_a_path_names_its_tenants_simulation(stage: Stage) -> None:
    for client in (stage.acme, stage.bolt):
        answer = await client.post(f"{IMPLIED}{CHAT}", json={"messages": MESSAGES})
        assert answer.status_code == 200
    assert stage.playing.sims == [session(ACME, "village"), session(BOLT, "village")]


@pytest.mark.parametrize("sim", ["s" * 256, "~4:acme/village", "~", "a/b ~é"])
async def test_any_name_will_do(rig: Rig, sim: str) -> None:
    """With tenants and without: as long as one may be, and like those that are used inside."""
    for stage in (Stage(rig, DIGESTS), Stage(rig, {})):
        path = f"/v1/rounds/{sim.replace('/', '%2F')}"
        answer = await stage.acme.post("/v1/rounds", json={**FIRST, "sim": sim})
        assert answer.json()["sim"] == sim
        assert answer.json()["failed"] == 0
        assert (await stage.acme.get(f"{path}/0")).json()["sim"] == sim
        refused = check_error(await stage.acme.get(f"{path}/1"))
        assert f"sim {sim!r} are not on record" in refused["message"]
        assert (await stage.acme.delete(path)).json() == {"sim": sim, "deleted": True}
        await stage.close()
    assert stage.playing.sims[0] in (sim, f"~0:/{sim}")
