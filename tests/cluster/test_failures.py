"""Clients that go away, and replicas that die, for real."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.cluster.test_exactness import expected_chat
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

LONG = "The ferry keeper tells of the flood, and the children listen. " * 40


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with openai.AsyncOpenAI(
        base_url=cluster.url, api_key="none", max_retries=0, timeout=180
    ) as client:
        yield client


async def stream(
    client: openai.AsyncOpenAI, text: str, max_tokens: int, started: asyncio.Event | None = None
) -> str:
    """A streamed answer; sets `started` with its first piece."""
    said = ""
    async for chunk in await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if started is not None and said:
            started.set()
    return said


async def test_two_hundred_cancelled_streams(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """Cut off at any moment, before, during and after prefill, alone and in rounds of two."""
    draw = random.Random(7)
    began: set[int] = set()
    ended: set[int] = set()

    async def one(number: int) -> None:
        place = {"sim": f"c{number // 4}", "round": 0, "agent": f"a{number % 4}", "n_agents": 2}
        text = f"{number}: " + "word " * draw.randint(1, 60)
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True} | ({"td_round": place} if number % 2 == 0 else {}),
        )
        async for _ in answer:
            began.add(number)
        ended.add(number)

    for batch in range(0, 200, 40):
        tasks = [asyncio.create_task(one(batch + number)) for number in range(40)]
        for task in tasks:
            asyncio.get_running_loop().call_later(draw.uniform(0, 8), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
    assert began, "no stream was cut off in mid-answer"
    assert len(began) < 200, "no stream was cut off before its answer"
    assert not ended
    await asyncio.to_thread(cluster.wait_until_idle)


async def test_a_client_that_leaves_a_whole_answer(cluster: Cluster) -> None:
    async with httpx.AsyncClient(timeout=2) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                f"{cluster.url}/chat/completions",
                json={
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "Leave."}],
                    "max_tokens": 2000,
                    "ignore_eos": True,
                },
            )
    # 2000 tokens take minutes: the engines are idle long before only if the request was cancelled.
    await asyncio.to_thread(cluster.wait_until_idle, 20)


async def test_members_that_leave_in_mid_prefill_stop_it(cluster: Cluster) -> None:
    """Prompts that take long to prefill: the engine stops when their clients have gone."""
    agents = ["adam", "bert", "mary", "zoe"]
    place = {"sim": "stop", "round": 0, "n_agents": len(agents)}

    def body(agent: str, **more: Any) -> dict[str, Any]:
        prompt = f"{agent} " + "speaks of rivers and of bread " * 450
        return {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}

    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{cluster.url}/completions"
        members = [
            asyncio.create_task(http.post(url, json=body(a, td_round={**place, "agent": a})))
            for a in agents
        ]
        await asyncio.to_thread(
            wait_for,
            lambda: any(s["role"] == "prefill" and s["running"] for s in cluster.replicas()),
            30,
            lambda: f"a busy prefill engine: {cluster.replicas()}",
        )
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)
        await asyncio.to_thread(cluster.wait_until_idle)
        # A step under way is finished, and one holds little more than a prompt. Had all been
        # computed to their end, the last one would be in the prefix cache now.
        usage = (await http.post(url, json=body(agents[-1]))).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] / 2


@pytest.mark.parametrize("victim", ["DecodeReplica", "PrefillReplica"])
async def test_a_replica_is_killed_while_it_works(
    cluster: Cluster, client: openai.AsyncOpenAI, plain: Any, victim: str
) -> None:
    """What had put out something breaks off clearly; the rest is served by the next replica."""
    started = asyncio.Event()
    speaking = asyncio.create_task(stream(client, "Tell a long story.", 300, started))
    await asyncio.wait_for(started.wait(), 120)
    # Not started yet when the replica dies: its prompt is long, and nobody has it cached.
    pending = asyncio.create_task(stream(client, f"{victim}: {LONG}", 24))
    await asyncio.sleep(1.0)
    born = {state["epoch"] for state in cluster.replicas()}
    cluster.kill(victim)
    if victim == "DecodeReplica":
        with pytest.raises(openai.APIError, match="broke off in mid-answer"):
            await speaking
    else:
        # Its prompt has been handed over: the prefill replica is not needed any more.
        assert await speaking
    expected, tokens = expected_chat(plain, f"{victim}: {LONG}")
    assert await pending == expected
    assert len(tokens) == 24
    await asyncio.to_thread(wait_for, cluster.is_running, 120, "recovery")
    wait_for(lambda: len(cluster.replicas()) == 2, 60, lambda: f"2 replicas: {cluster.replicas()}")
    assert len({state["epoch"] for state in cluster.replicas()} - born) == 1
    await asyncio.to_thread(cluster.wait_until_idle)
    assert await stream(client, f"{victim}: {LONG}", 24) == expected


async def test_the_coordinator_is_killed_while_members_gather(cluster: Cluster) -> None:
    """They had no output yet: the next coordinator gathers them anew."""

    async def speak(http: httpx.AsyncClient, agent: str) -> int:
        place = {"sim": "orphans", "round": 0, "agent": agent, "n_agents": 3, "deadline_ms": 60_000}
        answer = await http.post(
            f"{cluster.url}/completions",
            json={"model": MODEL, "prompt": f"{agent} says", "max_tokens": 4, "td_round": place},
        )
        return answer.status_code

    async with httpx.AsyncClient(timeout=120) as http:
        early = [asyncio.create_task(speak(http, agent)) for agent in ("adam", "mary")]
        await asyncio.sleep(2)  # so that they are on the coordinator that dies
        cluster.kill("RoundCoordinator")
        await asyncio.to_thread(wait_for, cluster.is_running, 120, "recovery")
        assert [await speak(http, "wren"), *await asyncio.gather(*early)] == [200, 200, 200]
        record = (await http.get(f"{cluster.url}/rounds/orphans/0")).json()
    assert [one["agent"] for one in record["outputs"]] == ["adam", "mary", "wren"]


async def test_the_directory_is_killed(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """Soft state: requests do not need it, and the replicas register with the next one."""
    before = {state["replica"] for state in cluster.replicas()}
    cluster.kill("KVDirectory")
    assert await stream(client, "Is anybody there?", 4)
    await asyncio.to_thread(
        wait_for,
        lambda: {state["replica"] for state in cluster.replicas()} == before,
        60,
        "the replicas in the new directory",
    )


async def test_pins_end_when_the_decode_replica_dies_before_it_reads(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    """Prefill finishes with nobody to read it: given up, or at the latest ended by the lease."""
    cluster.kill("DecodeReplica")
    waiting = asyncio.create_task(stream(client, f"Pins: {LONG}", 8))
    await asyncio.to_thread(
        wait_for,
        lambda: any(s["role"] == "prefill" and s["kv_usage"] > 0 for s in cluster.replicas()),
        60,
        lambda: f"a pinned prefill: {cluster.replicas()}",
    )
    assert await waiting
    await asyncio.to_thread(wait_for, cluster.is_running, 120, "recovery")
    await asyncio.to_thread(cluster.wait_until_idle)


async def test_an_engine_dies_under_its_replica(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    """The replica notices at its next health check, and is replaced; no process is left over."""
    (replica,) = cluster.pids("DecodeReplica")
    engines = [
        child
        for child in psutil.Process(replica).children(recursive=True)
        if "Engine" in child.name()
    ]
    assert engines
    for engine in engines:
        os.kill(engine.pid, signal.SIGKILL)
    answer = await stream(client, "Say something after the crash.", 8)
    assert answer
    await asyncio.to_thread(wait_for, cluster.is_running, 120, "recovery")
    assert cluster.pids("DecodeReplica") != [replica]
    assert not any(engine.is_running() and engine.status() != "zombie" for engine in engines)
    await asyncio.to_thread(cluster.wait_until_idle)
