"""Two replicas of each kind: turns go where their KV is, and outlive any one replica; and they are
deployed anew."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest
from vllm import SamplingParams

from tests.cluster.harness import Cluster, cluster_file, complete, is_engine, wait_for
from tests.plain import plain_engine

pytestmark = pytest.mark.cluster(alone=True)

MODEL = "tiny"
FIRST, MORE, REPLY = 70, 10, 24
"""Tokens of a first prompt (more than the fewest that are read), of what each later turn adds, and
of an answer."""


@pytest.fixture(scope="module")
def one_engine(tiny_model: Path) -> Any:
    """A plain vLLM engine of the same model: what the deployment must agree with."""
    return plain_engine(tiny_model)


@pytest.fixture(scope="module")
def fleet(tiny_model: Path) -> Iterator[Cluster]:
    Cluster.stop_all()
    with Cluster() as cluster:
        cluster.deploy(
            cluster_file(
                model=str(tiny_model),
                engine={"max_model_len": 4096, "kv_cache_gib": 0.1},
                frontend={"served_model_name": MODEL},
                ingress={"num_replicas": 2},
                coordinator={"num_replicas": 2},
                # So that what prefill has not computed, it has read.
                prefill={"num_replicas": 2, "engine": {"enable_prefix_caching": False}},
                decode={"num_replicas": 2},
            )
        )
        yield cluster


@pytest.fixture
async def client(fleet: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=fleet.url, api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


class Turn(NamedTuple):
    """`cached` is how many of the prompt's tokens no engine computed."""

    prompt: list[int]
    answer: list[int]
    cached: int


class Conversation:
    """Turns whose prompts grow by one another. What it says depends on its name alone."""

    def __init__(self, client: openai.AsyncOpenAI, name: str) -> None:
        self.name = name
        self.turns: list[Turn] = []
        self._client = client
        self._draw = random.Random(name)

    async def speak(self, **body: Any) -> None:
        """Another turn."""
        prompt = self._tokens(FIRST)
        if self.turns:
            prompt = [*self.turns[-1].prompt, *self.turns[-1].answer, *prompt[:MORE]]
        answer: Any = await self._client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=REPLY,
            temperature=0,
            extra_headers={"x-session-id": self.name},
            extra_body={"ignore_eos": True, "return_token_ids": True, **body},
        )
        tokens = answer.choices[0].token_ids
        self.turns.append(Turn(prompt, tokens, answer.usage.prompt_tokens_details.cached_tokens))

    @property
    def read(self) -> int:
        """How many tokens the last turn did not compute."""
        return self.turns[-1].cached

    @property
    def readable(self) -> int:
        """How many there were: all of the turn before, but its last token was never fed back."""
        return 0 if len(self.turns) == 1 else len(self.turns[-2].prompt) + REPLY - 1

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices(range(1000, 40_000), k=count)


class Conversations(list[Conversation]):
    async def speak(self) -> None:
        """A turn of each, all at once."""
        await asyncio.gather(*(one.speak() for one in self))

    def check_all_was_read(self) -> None:
        assert [one.read for one in self] == [one.readable for one in self]


@pytest.fixture
def many(
    fleet: Cluster, one_engine: Any, client: openai.AsyncOpenAI, request: pytest.FixtureRequest
) -> Iterator[Conversations]:
    """As many as must not all meet the same fate. In the end nothing of them stays, and what they
    were answered is what one engine says."""
    names = [f"{request.node.name}-{number}" for number in range(16)]
    conversations = Conversations(Conversation(client, name) for name in names)
    yield conversations
    for name in names:
        httpx.delete(f"{fleet.url}/conversations/{name}", timeout=30).raise_for_status()
    wait_for(lambda: not sum(leases(fleet)), 30, lambda: f"no leases: {leases(fleet)}")
    fleet.wait_until_idle()
    turns = [turn for one in conversations for turn in one.turns]
    outputs = one_engine.generate(
        [{"prompt_token_ids": turn.prompt} for turn in turns],
        SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True),
        use_tqdm=False,
    )
    assert [turn.answer for turn in turns] == [list(one.outputs[0].token_ids) for one in outputs]


def states(fleet: Cluster, role: str) -> list[dict[str, Any]]:
    return [one for one in fleet.replicas() if one["role"] == role]


def kinds(fleet: Cluster) -> Counter[str]:
    """How many replicas of each kind the directory knows."""
    return Counter(one["role"] for one in fleet.replicas())


def leases(fleet: Cluster) -> list[int]:
    """How many turns each decode replica keeps, as far as the directory knows."""
    return [one["leases"] for one in states(fleet, "decode")]


async def until_kept(fleet: Cluster, turns: int) -> None:
    await asyncio.to_thread(
        wait_for,
        lambda: sum(leases(fleet)) == turns,
        30,
        lambda: f"{turns} leases: {leases(fleet)}",
    )


@contextlib.contextmanager
def standing_still(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def test_a_session_has_one_coordinator_whichever_ingress_it_comes_by(fleet: Cluster) -> None:
    """Members that met different coordinators would wait for each other until the deadline."""
    agents, sims = ["adam", "mary", "wren"], [f"hashed-{number}" for number in range(8)]

    def play(sim: str, agent: str) -> None:
        place = {"sim": sim, "round": 0, "agent": agent, "n_agents": 3, "deadline_ms": 60_000}
        complete(fleet, td_round=place)

    with ThreadPoolExecutor(24) as pool:
        for done in [pool.submit(play, sim, agent) for sim in sims for agent in agents]:
            done.result()
    assert len(fleet.pids("Ingress")) == len(fleet.pids("RoundCoordinator")) == 2
    for sim in sims:
        outputs = httpx.get(f"{fleet.url}/rounds/{sim}/0", timeout=30).json()["outputs"]
        assert [one["agent"] for one in outputs] == agents
    logs = fleet.logged()
    for sim in sims:
        assert f"round 0 of sim {sim!r}: 3 members, 0 absent" in logs


async def test_every_turn_reads_all_of_the_last_one(fleet: Cluster, many: Conversations) -> None:
    async def play(one: Conversation) -> None:
        for _ in range(3):
            await one.speak()
            assert one.read == one.readable

    await asyncio.gather(*(play(one) for one in many))
    await until_kept(fleet, len(many))
    assert all(leases(fleet)), "both decode replicas keep some"


async def test_members_of_rounds_read_their_last_turns(many: Conversations) -> None:
    """A round goes to one prefill replica, wherever its members were prefilled, and are kept."""
    for number in range(3):
        place = {"sim": "fleet", "round": number, "n_agents": len(many), "deadline_ms": 60_000}
        await asyncio.gather(*(one.speak(td_round={**place, "agent": one.name}) for one in many))
        many.check_all_was_read()


def test_rounds_of_a_session_go_where_their_histories_are_kept(fleet: Cluster) -> None:
    """By chance they would do so half the time."""
    agents = ("ada", "bo", "cyd")
    shared = [
        {"agent": agent, "text": f"{agent} says: the ferry is late. " * 4} for agent in agents
    ]
    with fleet.reusing(mode="blend", rule="none"):
        for sim in (f"histories-{number}" for number in range(6)):
            cached = []
            for number in range(2):
                body = {
                    "model": MODEL,
                    "sim": sim,
                    "round": number,
                    "agents": [
                        {
                            "agent": agent,
                            "system": f"You are {agent}. " * 20,
                            "task": f"Turn {number}.",
                        }
                        for agent in agents
                    ],
                    "shared": shared,
                    "completion": {"max_tokens": 2},
                    "stream": False,
                }
                answer = httpx.post(f"{fleet.url}/rounds", json=body, timeout=120)
                answer.raise_for_status()
                assert answer.json()["failed"] == 0
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            # What is shared is the same in both; of each history there are some 80 tokens.
            assert cached[1] - cached[0] > len(agents) * 60, cached


async def test_a_decode_replica_is_killed_between_turns(
    fleet: Cluster, many: Conversations
) -> None:
    """What it kept is computed anew; what the other one keeps is read."""
    await many.speak()
    await until_kept(fleet, len(many))
    victim, other = states(fleet, "decode")
    assert victim["leases"]
    assert other["leases"]
    os.kill(fleet.pid_of(victim["replica"]), signal.SIGKILL)
    await many.speak()
    read = Counter(one.read for one in many)
    assert read == {0: victim["leases"], FIRST + REPLY - 1: other["leases"]}
    await many.speak()
    many.check_all_was_read()


async def test_a_prefill_replica_is_killed_while_it_works(
    fleet: Cluster, many: Conversations
) -> None:
    """Its turns go to the other one, and read there what decode keeps."""
    await many.speak()
    victim = states(fleet, "prefill")[0]["replica"]
    with standing_still(fleet.engine_of(victim)):
        # What it is given now is under way when it dies.
        turns = [asyncio.create_task(one.speak()) for one in many]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        assert not all(turn.done() for turn in turns)
        os.kill(fleet.pid_of(victim), signal.SIGKILL)
    await asyncio.gather(*turns)
    # On a machine that is busy with the death some may have been computed instead.
    assert all(one.read in (0, one.readable) for one in many)
    await many.speak()
    many.check_all_was_read()


def test_what_was_killed_has_a_successor(fleet: Cluster) -> None:
    def is_whole() -> bool:
        return kinds(fleet) == {"prefill": 2, "decode": 2} and fleet.is_running()

    wait_for(is_whole, 120, lambda: f"two of each kind: {fleet.replicas()}")


async def test_a_conversation_that_moved_leaves_no_lease_behind(
    fleet: Cluster, many: Conversations
) -> None:
    """While the directory does not answer, turns go anywhere. Later it says which are older."""
    await many.speak()
    await until_kept(fleet, len(many))
    (directory,) = fleet.pids("KVDirectory")
    with standing_still(psutil.Process(directory)):
        await many.speak()
    assert {one.read for one in many} == {0}
    await asyncio.to_thread(
        wait_for, lambda: sum(leases(fleet)) > len(many), 30, "conversations that two keep"
    )
    # Long before any has expired.
    await until_kept(fleet, len(many))
    await many.speak()
    many.check_all_was_read()


async def test_a_prefill_replica_is_taken_away_while_turns_run(
    fleet: Cluster, many: Conversations
) -> None:
    """The fleet is smaller afterwards."""
    data = copy.deepcopy(fleet.data)
    overrides = data["applications"][0]["deployments"]
    overrides.append({"name": "PrefillReplica", "num_replicas": 1})
    kept = {one["epoch"] for one in fleet.replicas()}
    deploying = asyncio.create_task(asyncio.to_thread(fleet.deploy, data))

    async def play(one: Conversation) -> None:
        while not deploying.done():
            await one.speak()

    # Few: the deploying itself wants to get on.
    await asyncio.gather(deploying, *(play(one) for one in many[:4]))
    await asyncio.to_thread(
        wait_for, lambda: kinds(fleet)["prefill"] == 1, 30, "the directory to forget one"
    )
    assert {one["epoch"] for one in fleet.replicas()} < kept
    await many.speak()
    many.check_all_was_read()


def test_three_redeploys_leave_one_of_each(fleet: Cluster) -> None:
    """Each change of `args` makes every replica anew; none of the old ones stays. The last test
    here."""
    epochs = set()
    for number in range(3):
        data = copy.deepcopy(fleet.data)
        data["applications"][0].pop("deployments", None)
        args = data["applications"][0]["args"]
        args["engine"]["seed"] = number + 1
        args |= {"ingress": {}, "coordinator": {}}  # one of each
        args["prefill"] = {"drain_timeout_s": 5}
        args["decode"] = {"drain_timeout_s": 5}
        fleet.deploy(data)
        assert complete(fleet)["choices"]
        wait_for(lambda: len(fleet.replicas()) == 2, 60, "the old replicas' end")
        epochs.add(tuple(sorted(state["epoch"] for state in fleet.replicas())))
    assert len(epochs) == 3, "every redeploy made new engines"
    for deployment in (
        "Ingress",
        "RoundCoordinator",
        "KVDirectory",
        "PrefillReplica",
        "DecodeReplica",
    ):
        wait_for(
            lambda name=deployment: len(fleet.pids(name)) == 1,
            60,
            lambda name=deployment: f"one {name}: {fleet.pids(name)}",
        )
    engines = [p for p in fleet.processes() if is_engine(p)]
    assert len(engines) == 2, "no engine of an old replica is left"
