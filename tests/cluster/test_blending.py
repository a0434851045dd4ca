"""Rounds whose shared part is computed once, through the deployment."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

AGENTS = ("ada", "bo", "cyd")
SAID = {
    "ada": "I have baked forty loaves, and the oven is still warm. Whoever is hungry may come. ",
    "bo": "The river is a hand higher than yesterday; the ferry goes only before noon. ",
    "cyd": "Somebody has left the gate of the lower field open again, and two goats are gone. ",
}
_sims = itertools.count()


def play(cluster: Cluster, number: int = 0, **fields: Any) -> dict[str, Any]:
    """A round in which all read the same three texts."""
    body = {
        "model": MODEL,
        "sim": f"blend-{next(_sims)}",
        "round": number,
        "preamble": "You live in a village by a river.",
        "agents": [
            {
                "agent": agent,
                "system": f"You are {agent}, who has lived here for {years} years.",
                "private": f"{agent} slept badly and thinks of the winter. " * years,
                "task": "What do you do now? Answer in one sentence.",
            }
            for years, agent in enumerate(AGENTS, start=1)
        ],
        "shared": [{"agent": agent, "text": text * 3} for agent, text in SAID.items()],
        "completion": {"max_tokens": 24, "temperature": 0},
        "stream": False,
        **fields,
    }
    answer = httpx.post(f"{cluster.url}/rounds", json=body, timeout=120)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    assert found["failed"] == 0, found
    return found


def said(round_: dict[str, Any]) -> dict[str, str]:
    return {
        one["agent"]: one["response"]["choices"][0]["message"]["content"]
        for one in round_["results"]
    }


def assert_blended(cluster: Cluster, sim: str, number: int) -> None:
    """All three were in the round's pass, and no pass of that round failed, or was not made."""
    assert all(one["why_no_passes"] is None for one in cluster.replicas())
    logged = cluster.logged()
    assert f"round {number} of sim {sim!r}: 3 members, 0 absent, 3 share texts" in logged
    assert f"round {number} of sim {sim!r}: 3 of those that share texts were blended" in logged
    assert f"round {number} of session {sim!r}: the pass failed" not in logged


def test_wrong_settings_change_nothing_on_a_server_that_runs(cluster: Cluster) -> None:
    """The coordinator goes on by what it has, and says why."""
    with cluster.reusing(mode="blend", rule="full"):
        round_ = play(cluster)
        with cluster.reusing(mode="blend", rule="paper", check=False):
            again = play(cluster)
        assert said(again) == said(round_)
        assert_blended(cluster, again["sim"], 0)
    assert "user_config.reuse.rule: 'paper', expected one of full, none" in cluster.logged()
    cluster.wait_until_idle()


def test_a_pass_that_computes_everything_answers_as_ordinary_prefills_do(cluster: Cluster) -> None:
    exact = play(cluster)
    with cluster.reusing(mode="blend", rule="full"):
        blended = play(cluster)
    assert said(blended) == said(exact)
    assert_blended(cluster, blended["sim"], 0)
    assert blended["usage"]["prompt_tokens"] == exact["usage"]["prompt_tokens"]
    cluster.wait_until_idle()


def test_what_all_share_is_computed_once_and_exact_requests_stay_exact(cluster: Cluster) -> None:
    exact = play(cluster)
    with cluster.reusing(mode="blend", rule="none"):
        blended = play(cluster)
    assert said(blended).keys() == set(AGENTS)
    # Nobody computes the three texts: three times some sixty tokens each, for all of three agents.
    assert blended["usage"]["prompt_tokens_details"]["cached_tokens"] > 3 * 3 * 50
    assert said(play(cluster)) == said(exact)
    cluster.wait_until_idle()


def test_the_next_round_of_a_live_session_keeps_what_it_can(cluster: Cluster) -> None:
    """Nothing is handed in: the outputs on record are what is shared. By the default rule."""
    sim = f"blend-live-{next(_sims)}"
    with cluster.reusing(mode="blend"):
        for number in range(3):
            round_ = play(cluster, number, sim=sim, shared=None)
            assert said(round_).keys() == set(AGENTS)
            assert round_["shared_complete"]
            if number:  # in round 0 there is nothing to share
                assert_blended(cluster, sim, number)
            if number == 1:  # the next one is laid out as this one is
                told = f"round 1 of sim {sim!r}: told what it put out"
                wait_for(lambda: told in cluster.logged(), 30, "that")  # noqa: B023
    told = re.search(rf"round 2 of session '{sim}': of (\d+) .*, (\d+) were", cluster.logged())
    assert told is not None
    assert int(told[2]) == 0 < int(told[1])
    cluster.wait_until_idle()


def leases(cluster: Cluster) -> int:
    return sum(one["leases"] for one in cluster.replicas())


def test_what_was_said_is_read_from_where_it_was_decoded(cluster: Cluster) -> None:
    """With everything computed the answers are those of ordinary prefills all the same. The session
    has them kept, and no longer than it is itself."""
    exact, blended = (f"written-{next(_sims)}" for _ in range(2))

    def two_rounds(sim: str) -> list[dict[str, str]]:
        completion = {"max_tokens": 40, "min_tokens": 40, "temperature": 0}
        live: dict[str, Any] = {"sim": sim, "shared": None, "completion": completion}
        return [said(play(cluster, number, **live)) for number in range(2)]

    answers = two_rounds(exact)
    with cluster.reusing(mode="blend", rule="full", base="author"):
        assert two_rounds(blended) == answers
        wait_for(lambda: leases(cluster) == len(AGENTS), 30, "a lease for each")
    assert_blended(cluster, blended, 1)
    assert "3 of 3 outputs were read as they were decoded" in cluster.logged()
    (computed,) = re.findall(
        rf"round 1 of session '{blended}': of \d+ .*, (\d+) were", cluster.logged()
    )
    assert int(computed) < 3 * 40, "a header, and what stands around"
    httpx.delete(f"{cluster.url}/rounds/{blended}", timeout=30).raise_for_status()
    wait_for(lambda: leases(cluster) == 0, 30, "no lease")
    cluster.wait_until_idle()


async def chat_round(
    client: openai.AsyncOpenAI, sim: str, number: int, heard: dict[str, str]
) -> dict[str, str]:
    """A round of ordinary chats: each client lays its prompt out by itself."""
    talk = "\n\n".join(f"{agent} said: {text}" for agent, text in heard.items())

    async def speak(agent: str) -> str:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": f"You are {agent}. " + f"{agent} likes tea. " * 9},
                {"role": "user", "content": f"{talk}\n\nWhat do you say now, {agent}?"},
            ],
            max_tokens=40,
            temperature=0,
            extra_body={
                "ignore_eos": True,
                "td_round": {"sim": sim, "round": number, "agent": agent, "n_agents": len(AGENTS)},
            },
        )
        return answer.choices[0].message.content or ""

    texts = await asyncio.gather(*map(speak, AGENTS))
    return dict(zip(AGENTS, texts, strict=True))


def test_what_clients_repeat_of_the_last_round_is_found_in_their_prompts(cluster: Cluster) -> None:
    """Nothing marks it. With everything computed the answers are those of ordinary prefills."""

    async def two_rounds(sim: str) -> list[dict[str, str]]:
        async with openai.AsyncOpenAI(base_url=cluster.url, api_key="none", timeout=120) as client:
            first = await chat_round(client, sim, 0, {})
            return [first, await chat_round(client, sim, 1, first)]

    exact, blended = (f"quoted-{next(_sims)}" for _ in range(2))
    answers = asyncio.run(two_rounds(exact))
    with cluster.reusing(mode="blend", rule="full"):
        assert asyncio.run(two_rounds(blended)) == answers
    assert_blended(cluster, blended, 1)
    cluster.wait_until_idle()
