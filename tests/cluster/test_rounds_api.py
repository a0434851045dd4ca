"""Rounds through the deployment: gathered, cut off, refused, recorded, handed on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.harness import Cluster
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with openai.AsyncOpenAI(
        base_url=cluster.url, api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


async def speak(client: openai.AsyncOpenAI, agent: str, **place: Any) -> str:
    """One member's request; what it answers."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"You are {agent}. Say who you are."}],
        temperature=0,
        max_tokens=8,
        extra_body={"td_round": {"agent": agent, **place}},
    )
    return answer.choices[0].message.content or ""


async def record(cluster: Cluster, sim: str, number: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{cluster.url}/rounds/{sim}/{number}")
    answer.raise_for_status()
    outputs: list[dict[str, Any]] = answer.json()["outputs"]
    return outputs


async def test_members_wait_for_each_other_and_are_recorded(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    place = {"sim": "gather", "round": 0, "n_agents": 3, "deadline_ms": 60_000}
    first = asyncio.create_task(speak(client, "wren", **place))
    second = asyncio.create_task(speak(client, "adam", **place))
    done, _ = await asyncio.wait({first, second}, timeout=3)
    assert not done, "a member was served before the round was full"
    third = await speak(client, "mary", **place)
    texts = {"wren": await first, "adam": await second, "mary": third}
    outputs = await record(cluster, "gather", 0)
    assert [one["agent"] for one in outputs] == ["adam", "mary", "wren"]
    assert {one["agent"]: one["text"] for one in outputs} == texts


async def test_a_straggler_is_cut_off_and_served_alone(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    place = {"sim": "late", "round": 0, "n_agents": 3, "deadline_ms": 500}
    early = await asyncio.gather(*(speak(client, name, **place) for name in ("adam", "mary")))
    late = await speak(client, "wren", **place)
    assert all((*early, late))
    assert [one["agent"] for one in await record(cluster, "late", 0)] == ["adam", "mary", "wren"]


@pytest.mark.parametrize(
    ("agent", "change", "reason"),
    [
        ("adam", {}, "'adam' has already been served in round 0 of sim 'twice'"),
        ("mary", {"n_agents": 5}, "5, but round 0 of sim 'twice' was opened for 1 agents"),
    ],
    ids=["same agent", "other number"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_contradiction_gets_409_and_a_reason(
    client: openai.AsyncOpenAI, agent: str, change: dict[str, Any], reason: str, stream: bool
) -> None:
    place = {"sim": "twice", "round": 0, "n_agents": 1}
    with contextlib.suppress(openai.ConflictError):  # served by an earlier case
        await speak(client, "adam", **place)
    with pytest.raises(openai.ConflictError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Again."}],
            max_tokens=4,
            stream=stream,
            extra_body={"td_round": {"agent": agent, **place, **change}},
        )
    assert reason in caught.value.message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_a_client_does_wrong_is_no_failure_in_the_servers_log(
    cluster: Cluster, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """What the coordinator refuses, and what only a decode engine can."""
    place = {"sim": f"wrong-{stream}", "round": 0, "n_agents": 1}
    await speak(client, "adam", **place)
    before = cluster.logged()

    async def ask(**extra: Any) -> None:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Again."}],
            max_tokens=4,
            stream=stream,
            extra_body=extra,
        )

    with pytest.raises(openai.ConflictError):
        await ask(td_round={"agent": "adam", **place})
    grammar = {"structured_outputs": {"grammar": "root ::= root"}}
    for more in ({}, {"td_round": {"agent": "adam", **place, "round": 1}}):
        with pytest.raises(openai.BadRequestError):
            await ask(**grammar, **more)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{cluster.url}/rounds/nobody/0")).status_code == 404
    said = cluster.logged()
    for word in ("Traceback", "Request failed"):
        assert said.count(word) == before.count(word), said[-4000:]


async def test_cancelled_members_leave_their_round(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    place = {"sim": "left", "round": 0, "n_agents": 2, "deadline_ms": 60_000}
    gone = asyncio.create_task(speak(client, "adam", **place))
    await asyncio.sleep(2)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.sleep(2)
    again = await asyncio.gather(*(speak(client, name, **place) for name in ("adam", "mary")))
    assert all(again)


async def test_a_member_by_its_path_alone(cluster: Cluster) -> None:
    """The zero-change path: only the base URL says who asks, the server counts the rounds."""
    agents = ["adam", "mary", "wren"]
    clients = [
        openai.AsyncOpenAI(
            base_url=f"{cluster.base}/sim/implied/agent/{agent}/v1", api_key="none", timeout=120
        )
        for agent in agents
    ]
    for _ in range(2):
        await asyncio.gather(
            *(
                one.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "Speak."}],
                    temperature=0,
                    max_tokens=4,
                )
                for one in clients
            )
        )
    rounds = [await _agents_of(cluster, "implied", number) for number in range(3)]
    # The first round cannot know how many will come; the second one waits for those of the first.
    assert rounds == [agents, agents, []]
    for one in clients:
        await one.close()


async def _agents_of(cluster: Cluster, sim: str, number: int) -> list[str]:
    """Who is on record for a round; nobody, if it is not."""
    try:
        return [one["agent"] for one in await record(cluster, sim, number)]
    except httpx.HTTPStatusError:
        return []


def whole_round(sim: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "sim": sim,
        "round": number,
        "preamble": "You live in a village.",
        "agents": [
            {
                "agent": "mary",
                "system": "You are Mary.",
                "private": "You saw a fox.",
                "task": "Go.",
            },
            {"agent": "adam", "system": "You are Adam.", "private": "It rained.", "task": "Speak."},
        ],
        "completion": {"temperature": 0, "max_tokens": 8},
        **more,
    }


async def events(cluster: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with (
        httpx.AsyncClient(timeout=120) as http,
        http.stream("POST", f"{cluster.url}/rounds", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        return [
            json.loads(line.removeprefix("data: "))
            async for line in answer.aiter_lines()
            if line.startswith("data: {")
        ]


@pytest.mark.parametrize("layout", ["history_first", "shared_first"])
async def test_whole_rounds_hand_outputs_on(cluster: Cluster, layout: str) -> None:
    sim = f"whole-{layout}"
    *members, sums = await events(cluster, whole_round(sim, 0, layout=layout))
    assert {one["agent"] for one in members} == {"adam", "mary"}
    assert sums["shared"] == []
    first = sums["usage"]["prompt_tokens"]
    outputs = await record(cluster, sim, 0)
    assert [one["agent"] for one in outputs] == ["mary", "adam"], "the order of the request"

    body = whole_round(sim, 1, layout=layout, stream=False)
    async with httpx.AsyncClient(timeout=120) as http:
        answer = (await http.post(f"{cluster.url}/rounds", json=body)).json()
        handed_in = whole_round(
            sim + "-in",
            1,
            layout=layout,
            stream=False,
            shared=[{"agent": one["agent"], "text": one["text"]} for one in outputs],
        )
        same = (await http.post(f"{cluster.url}/rounds", json=handed_in)).json()
    assert answer["shared"] == ["mary", "adam"]
    assert answer["usage"]["prompt_tokens"] > first, "the outputs are part of the prompts"
    texts = [
        {
            one["agent"]: one["response"]["choices"][0]["message"]["content"]
            for one in got["results"]
        }
        for got in (answer, same)
    ]
    assert texts[0] == texts[1], "the record and the handed-in outputs give the same round"


async def test_rounds_without_a_record_and_forgotten_ones(cluster: Cluster) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        unknown = await http.post(f"{cluster.url}/rounds", json=whole_round("nobody", 3))
        assert unknown.status_code == 409
        assert "hand them in as `shared`" in unknown.json()["error"]["message"]
        await http.post(f"{cluster.url}/rounds", json=whole_round("brief", 0, stream=False))
        assert (await http.delete(f"{cluster.url}/rounds/brief")).json()["deleted"] is True
        assert (await http.delete(f"{cluster.url}/rounds/brief")).json()["deleted"] is False
        assert (await http.get(f"{cluster.url}/rounds/brief/0")).status_code == 404


async def test_a_chosen_request_id_mixes_nobody_up(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    """Two members with the same `request_id`: each is answered on its own prompt."""
    questions = {"adam": "Count: one, two,", "mary": "The colours of the rainbow are"}

    async def ask(agent: str, **extra: Any) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt=questions[agent], temperature=0, max_tokens=8, extra_body=extra
        )
        return answer.choices[0].text

    alone = {agent: await ask(agent) for agent in questions}
    place = {"sim": "same-id", "round": 0, "n_agents": 2}
    together = await asyncio.gather(
        *(ask(a, request_id="x", td_round={**place, "agent": a}) for a in questions)
    )
    assert dict(zip(questions, together, strict=True)) == alone


async def test_a_list_of_prompts_is_no_member(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2 prompts, expected one"):
        await client.completions.create(
            model=MODEL,
            prompt=["a", "b"],
            max_tokens=1,
            extra_body={"td_round": {"sim": "l", "round": 0, "agent": "a", "n_agents": 1}},
        )


async def test_two_sessions_at_once_do_not_mix(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    names = ["adam", "mary", "wren", "zoe"]
    await asyncio.gather(
        *(
            speak(client, name, sim=sim, round=0, n_agents=4, deadline_ms=60_000)
            for sim in ("one", "two")
            for name in names
        )
    )
    for sim in ("one", "two"):
        assert [one["agent"] for one in await record(cluster, sim, 0)] == names
    await asyncio.to_thread(cluster.wait_until_idle)
