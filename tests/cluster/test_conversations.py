"""Conversations through the deployment: turns are read back, and answers stay exact."""

from __future__ import annotations

import random
from http import HTTPStatus
from typing import Any

import httpx
import openai
import pytest
from vllm import SamplingParams

from tests.cluster.harness import Cluster, wait_for
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

REPLY = 80
"""More than the tokens below which prefill computes."""


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=cluster.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(autouse=True)
def nothing_stays(cluster: Cluster) -> Any:
    yield
    for name in NAMES:
        httpx.delete(f"{cluster.url}/conversations/{name}", timeout=30)
    cluster.wait_until_idle()


NAMES = ("one", "two", "three", "four")


def turn(
    client: openai.OpenAI, prompt: list[int], name: str, *, stream: bool = False, **body: Any
) -> tuple[list[int], int]:
    """A turn's tokens, and how many of its prompt no engine computed."""
    answer: Any = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=REPLY,
        temperature=0,
        stream=stream,
        stream_options={"include_usage": True} if stream else openai.omit,
        extra_headers={"x-session-id": name},
        extra_body={"ignore_eos": True, "return_token_ids": True, **body},
    )
    chunks = list(answer) if stream else [answer]
    tokens = [token for chunk in chunks for one in chunk.choices for token in one.token_ids]
    return tokens, chunks[-1].usage.prompt_tokens_details.cached_tokens


def wanted(plain: Any, prompt: list[int]) -> list[int]:
    (output,) = plain.generate(
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True),
        use_tqdm=False,
    )
    return list(output.outputs[0].token_ids)


def leases(cluster: Cluster) -> int:
    return int(sum(one["leases"] for one in cluster.replicas()))


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=70)


@pytest.mark.parametrize("stream", [False, True])
def test_a_next_turn_is_read_back_and_answers_as_one_engine_would(
    client: openai.OpenAI, plain: Any, stream: bool
) -> None:
    prompt = prompt_of(1 + stream)
    answer, cached = turn(client, prompt, "one", stream=stream)
    assert cached == 0
    longer = prompt + answer + prompt_of(3)[:10]
    answer, cached = turn(client, longer, "one", stream=stream)
    # All but the reply's last token, which was never fed back.
    assert cached == len(prompt) + REPLY - 1
    assert answer == wanted(plain, longer)


@pytest.mark.parametrize("off_at", [0, 1])
def test_the_switch_keeps_a_turn_from_being_kept_or_read(
    client: openai.OpenAI, off_at: int
) -> None:
    """Of the prompt alone, prefill's own prefix cache has the whole blocks."""
    off = {"bidirectional_kv_xfer": False}
    prompt = prompt_of(20 + off_at)
    answer, _ = turn(client, prompt, "two", **(off if off_at == 0 else {}))
    longer = prompt + answer + prompt_of(5)[:10]
    _, cached = turn(client, longer, "two", **(off if off_at == 1 else {}))
    assert cached == len(prompt) // 32 * 32


def test_a_new_directory_learns_what_is_kept(client: openai.OpenAI, cluster: Cluster) -> None:
    prompt = prompt_of(7)
    answer, _ = turn(client, prompt, "three")
    cluster.kill("KVDirectory")
    wait_for(lambda: len(cluster.replicas()) == 2, 60, "the new directory")
    longer = prompt + answer + prompt_of(8)[:10]
    _, cached = turn(client, longer, "three")
    assert cached == len(prompt) + REPLY - 1


def test_a_conversation_is_kept_until_it_is_deleted(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    turn(client, prompt_of(9), "four")
    wait_for(lambda: leases(cluster) == 1, 10, "the lease")
    gone = httpx.delete(f"{cluster.url}/conversations/four", timeout=30).json()
    assert gone == {"conversation": "four", "deleted": True}
    wait_for(lambda: leases(cluster) == 0, 10, "the end of the lease")


def test_a_deletion_that_not_every_replica_has_heard_of_says_so(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    turn(client, prompt_of(10), "one")
    (decode,) = (one["replica"] for one in cluster.replicas() if one["role"] == "decode")
    engine = cluster.engine_of(decode)
    engine.suspend()
    try:
        answer = httpx.delete(f"{cluster.url}/conversations/one", timeout=60)
    finally:
        engine.resume()
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert "1 of 1 replicas did not answer" in answer.json()["error"]["message"]
    again = httpx.delete(f"{cluster.url}/conversations/one", timeout=30)
    assert again.status_code == HTTPStatus.OK, "by now it may have heard of the first"
    wait_for(lambda: leases(cluster) == 0, 10, "the end of the lease")
