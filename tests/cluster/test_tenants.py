"""Two tenants of one deployment: what is one's is not read, found, ended or seen by the other."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from td_serve.tenants import digest
from tests.cluster.harness import Cluster, cluster_file, complete

pytestmark = pytest.mark.cluster(beside=True)

MODEL = "tiny"
REPLY = 80
"""More than the tokens below which prefill computes."""
KEYS = {"acme": "td-acme-secret", "bolt": "td-bolt-secret"}


@pytest.fixture(scope="module")
def tenants(tiny_model: Path) -> Iterator[Cluster]:
    """A small random model for two tenants, on a Ray of its own."""
    with Cluster() as cluster:
        cluster.headers = bearer("acme")
        cluster.deploy(
            cluster_file(
                model=str(tiny_model),
                engine={"max_model_len": 1024, "kv_cache_gib": 0.1},
                frontend={"served_model_name": MODEL},
                tenants={name: [digest(key)] for name, key in KEYS.items()},
            )
        )
        yield cluster
        cluster.wait_until_idle()


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


@pytest.fixture
def acme(tenants: Cluster) -> Iterator[openai.OpenAI]:
    with connect(tenants, KEYS["acme"]) as client:
        yield client


@pytest.fixture
def bolt(tenants: Cluster) -> Iterator[openai.OpenAI]:
    with connect(tenants, KEYS["bolt"]) as client:
        yield client


def connect(cluster: Cluster, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=cluster.url, api_key=key, max_retries=0, timeout=120)


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=70)


def turn(
    client: openai.OpenAI, prompt: list[int], name: str | None = None, **body: Any
) -> tuple[list[int], int]:
    """What the model puts out, and how many of the prompt's tokens no engine computed."""
    answer: Any = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=REPLY,
        temperature=0,
        extra_headers=None if name is None else {"x-session-id": name},
        extra_body={"ignore_eos": True, "return_token_ids": True, **body},
    )
    return answer.choices[0].token_ids, answer.usage.prompt_tokens_details.cached_tokens


def test_who_has_no_key_is_turned_away(tenants: Cluster) -> None:
    for path in ("models", "replicas", "rounds/village/0"):
        answer = httpx.get(f"{tenants.url}/{path}", timeout=30)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    with (
        connect(tenants, "td-other-secret") as client,
        pytest.raises(openai.AuthenticationError, match="a key that is nobody's") as caught,
    ):
        turn(client, prompt_of(0))
    assert "secret" not in str(caught.value)
    assert httpx.get(f"{tenants.base}/health", timeout=30).status_code == 200


def test_the_openai_client_has_a_key_to_give(acme: openai.OpenAI) -> None:
    assert [model.id for model in acme.models.list()] == [MODEL]
    answer = acme.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Speak."}], max_tokens=4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("own", [{}, {"cache_salt": "pepper"}])
def test_a_prefix_cache_has_nothing_of_another_tenants(
    acme: openai.OpenAI, bolt: openai.OpenAI, own: dict[str, str]
) -> None:
    """Whole blocks of 32 tokens of the prompt; a salt of the client's own still counts."""
    prompt = prompt_of(10 + len(own))
    answers = [turn(client, prompt, **own) for client in (acme, acme, bolt, bolt)]
    assert [cached for _, cached in answers] == [0, 64, 0, 64]
    assert all(tokens == answers[0][0] for tokens, _ in answers)
    assert turn(acme, prompt, cache_salt="other")[1] == 0


def test_a_conversation_is_read_and_ended_by_its_tenant_alone(
    tenants: Cluster, acme: openai.OpenAI, bolt: openai.OpenAI
) -> None:
    prompt = prompt_of(20)
    answer, cached = turn(acme, prompt, "chat")
    assert cached == 0
    longer = prompt + answer + prompt_of(21)[:10]
    theirs, cached = turn(bolt, longer, "chat")
    assert cached == 0
    with httpx.Client(base_url=tenants.url, headers=bearer("bolt"), timeout=30) as http:
        assert http.delete("/conversations/chat").json()["deleted"]
        assert not http.delete("/conversations/chat").json()["deleted"]
    # All but the reply's last token, which was never fed back: read from the decode engine.
    ours, cached = turn(acme, longer, "chat")
    assert cached == len(prompt) + REPLY - 1
    assert ours == theirs
    with httpx.Client(base_url=tenants.url, headers=bearer("acme"), timeout=30) as http:
        assert http.delete("/conversations/chat").json()["deleted"]


def test_a_round_is_seen_by_its_tenant_alone(tenants: Cluster) -> None:
    body = {
        "model": MODEL,
        "sim": "village",
        "round": 0,
        "agents": [{"agent": "ada", "task": "Speak."}, {"agent": "bo", "task": "Speak."}],
        "completion": {"max_tokens": 4},
        "stream": False,
    }
    ours, theirs = (
        httpx.Client(base_url=tenants.url, headers=bearer(name), timeout=60)
        for name in ("acme", "bolt")
    )
    with ours, theirs:
        played = ours.post("/rounds", json=body).json()
        assert (played["sim"], played["failed"]) == ("village", 0)
        refused = theirs.get("/rounds/village/0")
        assert refused.status_code == 404
        assert "round 0 of sim 'village'" in refused.json()["error"]["message"]
        assert theirs.post("/rounds", json={**body, "round": 1}).status_code == 409
        assert not theirs.delete("/rounds/village").json()["deleted"]
        record = ours.get("/rounds/village/0").json()
        assert record["sim"] == "village"
        assert [one["agent"] for one in record["outputs"]] == ["ada", "bo"]
        # An agent that has spoken there has not spoken here.
        assert theirs.post("/rounds", json=body).json()["failed"] == 0
        again = ours.post("/rounds", json=body)
        assert again.status_code == 409
        assert "round 0 of sim 'village'" in again.text
        assert ours.delete("/rounds/village").json() == {"sim": "village", "deleted": True}
        assert theirs.get("/rounds/village/0").status_code == 200


def test_two_deployments_do_not_meet(tenants: Cluster, cluster: Cluster) -> None:
    """On one machine: other ports, engines and directories; each answers for its own model."""
    states = [*cluster.replicas(), *tenants.replicas()]
    assert len(states) == 4
    for name in ("replica", "nixl_port"):
        assert len({state[name] for state in states}) == 4, name
    here, there = complete(cluster, temperature=0), complete(tenants, temperature=0)
    assert here["model"] != there["model"]
    assert here["choices"][0]["text"] != there["choices"][0]["text"]
    cluster.wait_until_idle()
    tenants.wait_until_idle()


def test_no_log_of_any_process_has_a_key(tenants: Cluster) -> None:
    """Ours, Serve's and Ray's. The last test here: all has been asked by now."""
    logs = [path for path in tenants.temp.rglob("*") if path.is_file() and "logs" in path.parts]
    assert any("replica" in path.name for path in logs)
    found = [path for path in logs if re.search(rb"td-\w+-secret", path.read_bytes())]
    assert not found
