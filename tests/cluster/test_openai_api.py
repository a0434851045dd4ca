"""What the unmodified `openai` client sees."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.cluster.harness import Cluster
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

HELLO: Any = [{"role": "user", "content": "Say hello to the baker."}]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=cluster.url, api_key="none", max_retries=0, timeout=120)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 4096  # type: ignore[attr-defined]


def test_stream_ends_with_usage_and_comes_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    contents = [c.choices[0].delta.content for c in chunks if c.choices]
    assert sum(bool(content) for content in contents) > 3
    usage = chunks[-1].usage
    assert usage is not None
    assert not chunks[-1].choices
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_cached_tokens_are_those_that_prefill_did_not_compute(client: openai.OpenAI) -> None:
    words = "A prompt that nobody has sent before this test, and that fills blocks. " * 10
    usages = [
        client.completions.create(model=MODEL, prompt=words + tail, max_tokens=1).usage
        for tail in ("One", "Two")
    ]
    cached = [
        usage.prompt_tokens_details.cached_tokens
        for usage in usages
        if usage and usage.prompt_tokens_details
    ]
    assert usages[0] is not None
    common_blocks = (usages[0].prompt_tokens - 2) // 32 * 32
    assert cached == [0, common_blocks]


def test_stop_logprobs_and_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=20,
        temperature=0.7,
        top_p=0.9,
        seed=3,
        n=2,
        stop=[" the"],
        logprobs=True,
        top_logprobs=3,
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert " the" not in (choice.message.content or "")
        assert choice.logprobs is not None
        assert choice.logprobs.content
        for position in choice.logprobs.content:
            assert position.logprob <= 0
            assert len(position.top_logprobs) >= 3


def test_prompt_logprobs_by_echo(client: openai.OpenAI, plain: Any) -> None:
    from vllm import SamplingParams

    prompt = "The mill stands by the river"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0, echo=True, logprobs=1
    )
    (output,) = plain.generate(
        prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), use_tqdm=False
    )
    expected = [
        entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert answer.choices[0].text.startswith(prompt)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1 : len(expected) + 1] == pytest.approx(expected, abs=1e-4)


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"bread": {"enum": ["rye", "wheat"]}, "loaves": {"enum": [1, 2, 3]}},
        "required": ["bread", "loaves"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "order", "schema": schema}},
    )
    order = json.loads(answer.choices[0].message.content or "")
    assert order.keys() == {"bread", "loaves"}
    assert order["bread"] in {"rye", "wheat"}


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "order_bread",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"kind": {"enum": ["rye", "wheat"]}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        },
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=100,
        temperature=0,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "order_bread"}},
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["order_bread"]
    assert json.loads(calls[0].function.arguments)["kind"] in {"rye", "wheat"}


async def test_async_client_with_many_requests_at_once(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=cluster.url, api_key="none", timeout=180) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=MODEL, prompt=f"Boat {number}", max_tokens=4)
                for number in range(32)
            )
        )
    assert all(answer.usage and answer.usage.completion_tokens == 4 for answer in answers)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "input_tokens"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, 400, "vllm_xargs"),
        ({"vllm_xargs": {"td_origin": "x"}}, 400, "vllm_xargs"),
        ({"use_beam_search": True, "n": 2}, 400, "use_beam_search"),
        ({"td_round": {"sim": "s"}}, 400, "td_round"),
        ({"top_logprobs": 99, "logprobs": True}, 400, "logprobs"),
        ({"stop_token_ids": [10**9]}, 400, "stop_token_ids"),
        ({"n": 129}, 400, "n"),
        (
            {
                "messages": [{"role": "user", "content": "w " * 200_000}],
                "truncate_prompt_tokens": 9,
            },
            413,
            "truncate_prompt_tokens",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_errors_have_openais_shape(
    client: openai.OpenAI, change: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": stream, **change}
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=body, cast_to=dict)
    assert caught.value.status_code == status
    assert caught.value.body["param"] == param  # type: ignore[index,call-overload]
    assert caught.value.body["code"] == status  # type: ignore[index,call-overload]
    assert param.split(".")[0] in caught.value.message or status == 404


def test_not_json(client: openai.OpenAI) -> None:
    answer = client._client.post(
        "chat/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [[], [[]], [10**6]])
def test_prompts_that_are_none_are_refused(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model=MODEL, prompt=prompt)


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": r"\p{L}+"},
        {"regex": "(?i)abc"},
        {"regex": r"[^\x00-\U0010ffff]"},
        {"grammar": "root ::= root"},
        {"json": {"$ref": "#"}},
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_is_the_clients_fault_whoever_came_before(
    client: openai.OpenAI, cluster: Cluster, grammar: dict[str, Any]
) -> None:
    """Some are refused before they are prefilled, some only the decode engine can tell."""

    def ask(wanted: dict[str, Any]) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4, extra_body={"structured_outputs": wanted}
        )
        return answer.choices[0].message.content

    assert set(ask({"regex": "[ab]+"}) or "") <= {"a", "b"}
    with pytest.raises(openai.BadRequestError, match=r"(?i)regex|grammar"):
        ask(grammar)
    assert set(ask({"regex": "[cd]+"}) or "") <= {"c", "d"}
    cluster.wait_until_idle()
