"""float32, greedy: the deployment (two engines, KV over NIXL) says what one plain engine says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.cluster.harness import Cluster
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

TOKENS = 24
QUESTIONS = [
    "Name three colours.",
    "Why is the sky blue? " * 3,
    # Longer than a block of 32 tokens by one, by half, and many blocks long.
    "count " * 33,
    "The ferry keeper counts the boats that come and go. " * 12,
    "Tell me about the storm that came over the valley in spring. " * 60,
]


def expected_chat(plain: Any, question: str) -> tuple[str, list[int]]:
    from vllm import SamplingParams

    messages: Any = [{"role": "user", "content": question}]
    (output,) = plain.chat(
        messages, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False
    )
    return output.outputs[0].text, list(output.outputs[0].token_ids)


def expected_completion(plain: Any, prompt: str) -> tuple[str, list[int]]:
    from vllm import SamplingParams

    (output,) = plain.generate(
        prompt, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False
    )
    return output.outputs[0].text, list(output.outputs[0].token_ids)


def ask(
    client: openai.OpenAI, question: str, *, stream: bool, extra: dict[str, Any]
) -> tuple[str, list[int]]:
    """Text and token ids of a chat completion through the deployment."""
    body = {"return_token_ids": True, **extra}
    messages: Any = [{"role": "user", "content": question}]
    if not stream:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS, extra_body=body
        )
        choice: Any = answer.choices[0]
        return choice.message.content, choice.token_ids
    text, tokens = "", []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body=body,
    ):
        for part in chunk.choices:
            piece: Any = part
            text += piece.delta.content or ""
            tokens += getattr(piece, "token_ids", None) or []
    return text, tokens


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=cluster.url, api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_chat(client: openai.OpenAI, plain: Any, question: str, stream: bool) -> None:
    assert ask(client, question, stream=stream, extra={}) == expected_chat(plain, question)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_completions_of_several_prompts(client: openai.OpenAI, plain: Any, stream: bool) -> None:
    prompts = ["The sea is", "x", "Once upon a time there was a miller. " * 20]
    body = {"return_token_ids": True}
    texts, tokens = [""] * len(prompts), [[] for _ in prompts]  # type: ignore[var-annotated]
    if stream:
        for chunk in client.completions.create(
            model=MODEL,
            prompt=prompts,
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            extra_body=body,
        ):
            for part in chunk.choices:
                piece: Any = part
                texts[piece.index] += piece.text
                tokens[piece.index] += getattr(piece, "token_ids", None) or []
    else:
        answer = client.completions.create(
            model=MODEL, prompt=prompts, temperature=0, max_tokens=TOKENS, extra_body=body
        )
        for part in answer.choices:
            piece = part
            texts[piece.index], tokens[piece.index] = piece.text, piece.token_ids
    assert list(zip(texts, tokens, strict=True)) == [
        expected_completion(plain, prompt) for prompt in prompts
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_members_of_a_round(client: openai.OpenAI, plain: Any, stream: bool) -> None:
    def play(number: int) -> tuple[str, list[int]]:
        place = {
            "sim": f"exact-{stream}",
            "round": 0,
            "agent": f"agent-{number}",
            "n_agents": len(QUESTIONS),
        }
        return ask(client, QUESTIONS[number], stream=stream, extra={"td_round": place})

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(play, range(len(QUESTIONS))))
    assert answers == [expected_chat(plain, question) for question in QUESTIONS]


def test_sampled_continuations_of_one_prompt(client: openai.OpenAI, plain: Any) -> None:
    """n > 1 reads the prompt once over NIXL and branches from there; seeds give the same texts."""
    from vllm import SamplingParams

    prompt = "The children of the village like to"
    params = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=TOKENS)
    (output,) = plain.generate(prompt, params, use_tqdm=False)
    answer = client.completions.create(
        model=MODEL, prompt=prompt, n=3, temperature=0.8, seed=7, max_tokens=TOKENS
    )
    assert [choice.text for choice in answer.choices] == [one.text for one in output.outputs]


def test_nothing_is_left_behind(cluster: Cluster, client: openai.OpenAI) -> None:
    ask(client, QUESTIONS[0], stream=True, extra={})
    cluster.wait_until_idle()
