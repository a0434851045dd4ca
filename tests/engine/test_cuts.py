"""Separators in what clients send: the model sees none, and segments have tokens of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from td_serve.config import EngineConfig, FrontendConfig
from td_serve.engine.openai import OpenAIFrontend
from td_serve.models.resolve import resolve
from td_serve.replies import JsonReply
from td_serve.segments import SEPARATOR
from td_serve.types import (
    AgentId,
    ChoiceDelta,
    Delta,
    GenerateRequest,
    Membership,
    Origin,
    SessionId,
)
from tests.conftest import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MEMBER = Origin(membership=Membership(sim=SessionId("sim"), agent=AgentId("ada")))


class Front:
    """The OpenAI layer, and what it asks of engines."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.tokenizer: Any = AutoTokenizer.from_pretrained(resolve(MODEL))
        self.openai: OpenAIFrontend

    async def serve(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        choice = ChoiceDelta(index=0, text="x", token_ids=[5], finish_reason="stop")
        yield Delta(choices=[choice], finished=True)

    async def chat(self, content: str, **fields: Any) -> GenerateRequest:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        reply = await self.openai.chat(body, MEMBER)
        assert isinstance(reply, JsonReply)
        assert reply.status == 200, reply.body
        return self.asked[-1]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    front = Front()
    front.openai = await OpenAIFrontend.start(
        resolve(MODEL),
        EngineConfig(dtype="float32", max_model_len=512),
        FrontendConfig(),
        "m",
        front.serve,
    )
    yield front
    front.openai.close()


async def test_a_prompt_without_separators_is_one_segment(front: Front) -> None:
    request = await front.chat("Hello there.")
    assert (request.cuts, request.head) == ([], [])


@pytest.mark.parametrize("around", ["", "x", "\n"])
async def test_a_segment_has_the_same_tokens_for_every_agent(front: Front, around: str) -> None:
    shared = "Ada says: it rains.\n\n"
    request = await front.chat(f"{around}{SEPARATOR}{shared}{SEPARATOR}{around}What now?")
    assert len(request.cuts) == 2
    first, second = request.cuts
    assert request.prompt_token_ids[first:second] == front.encode(shared)
    text = front.tokenizer.decode(request.prompt_token_ids)
    assert SEPARATOR not in text
    assert f"{around}{shared}{around}What now?".strip("\n") in text


async def test_leading_trailing_doubled_and_lonely_separators_are_legal(front: Front) -> None:
    plain = await front.chat("Hello")
    many = await front.chat(f"{SEPARATOR}{SEPARATOR}Hello{SEPARATOR}{SEPARATOR}")
    assert front.tokenizer.decode(many.prompt_token_ids) == front.tokenizer.decode(
        plain.prompt_token_ids
    )
    assert len(many.cuts) == 2
    assert (await front.chat(SEPARATOR)).prompt_token_ids


async def test_the_head_is_the_templates_own_with_a_neutral_system_text(front: Front) -> None:
    request = await front.chat(f"Hello{SEPARATOR}there")
    head = front.tokenizer.decode(request.head)
    assert head.startswith("<|im_start|>system\n")
    assert head.endswith("<|im_end|>\n<|im_start|>user\n")


async def test_a_text_completion_is_cut_too(front: Front) -> None:
    reply = await front.openai.complete(
        {"model": "m", "prompt": f"One{SEPARATOR} two", "max_tokens": 1}, MEMBER
    )
    assert isinstance(reply, JsonReply)
    assert reply.status == 200
    assert front.asked[-1].prompt_token_ids == front.encode("One") + front.encode(" two")
    assert front.asked[-1].cuts == [len(front.encode("One"))]


async def test_separators_and_a_prompt_cut_to_length_exclude_each_other(front: Front) -> None:
    reply = await front.openai.complete(
        {
            "model": "m",
            "prompt": f"One two three four five six{SEPARATOR} seven",
            "max_tokens": 1,
            "truncate_prompt_tokens": 3,
        },
        MEMBER,
    )
    assert isinstance(reply, JsonReply)
    assert reply.status == 400
    assert "expected only one of the two" in reply.body["error"]["message"]
