"""Separators in what clients send: the model sees none, and segments have tokens of their own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from td_serve.config import EngineConfig, FrontendConfig
from td_serve.engine.codec import decode_sampling
from td_serve.engine.cutting import Cutter
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

    async def start(self, frontend: FrontendConfig) -> None:
        self.openai = await OpenAIFrontend.start(
            resolve(MODEL),
            EngineConfig(dtype="float32", max_model_len=512),
            frontend,
            "m",
            self.serve,
        )

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
    await front.start(FrontendConfig())
    yield front
    front.openai.close()


async def test_a_token_may_take_the_separators_place() -> None:
    front = Front()
    await front.start(FrontendConfig(separator_as="<|endoftext|>"))
    (token,) = front.encode("<|endoftext|>")
    request = await front.chat(f"Ada{SEPARATOR}It rains.{SEPARATOR}What now?")
    assert [request.prompt_token_ids[cut] for cut in request.cuts[-2:]] == [token, token]
    assert [token, *front.encode("It rains.")] in segments(request)
    assert "Ada<|endoftext|>It rains.<|endoftext|>What" in front.tokenizer.decode(
        request.prompt_token_ids
    )
    front.openai.close()


async def test_a_prompt_without_separators_is_one_segment(front: Front) -> None:
    request = await front.chat("Hello there.")
    assert request.cuts == []
    assert request.head, "what others said may yet be found in it"


def segments(request: GenerateRequest) -> list[list[int]]:
    """The prompt's: head, what was cut, and the end."""
    edges = [0, *request.cuts, len(request.prompt_token_ids)]
    return [request.prompt_token_ids[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("around", ["", "x", "\n"])
async def test_a_segment_has_the_same_tokens_for_every_agent(front: Front, around: str) -> None:
    shared = "Ada says: it rains.\n\n"
    request = await front.chat(f"{around}{SEPARATOR}{shared}{SEPARATOR}{around}What now?")
    assert front.encode(shared) in segments(request)
    assert len(segments(request)) == 3 + bool(around)
    text = front.tokenizer.decode(request.prompt_token_ids)
    assert SEPARATOR not in text
    assert f"{around}{shared}{around}What now?".strip("\n") in text


async def test_leading_trailing_doubled_and_lonely_separators_are_legal(front: Front) -> None:
    plain = await front.chat("Hello")
    many = await front.chat(f"{SEPARATOR}{SEPARATOR}Hello{SEPARATOR}{SEPARATOR}")
    assert front.tokenizer.decode(many.prompt_token_ids) == front.tokenizer.decode(
        plain.prompt_token_ids
    )
    assert len(many.cuts) == 1
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


async def test_a_prompt_that_is_cut_to_a_length_is_in_one_piece(front: Front) -> None:
    body = {"model": "m", "prompt": f"One two three four{SEPARATOR} five", "max_tokens": 1}
    reply = await front.openai.complete({**body, "truncate_prompt_tokens": 3}, MEMBER)
    assert isinstance(reply, JsonReply)
    assert reply.status == 200
    assert front.asked[-1].prompt_token_ids == front.encode("One two three four five")[-3:]
    assert front.asked[-1].cuts == []


async def test_separators_take_no_room(front: Front) -> None:
    """The window has 512 tokens: what fits without separators fits with a hundred."""
    words = " word" * 400
    whole = await front.chat(words, max_tokens=50)
    cut = await front.chat(SEPARATOR.join([words[:1000], *[""] * 98, words[1000:]]), max_tokens=50)
    assert len(cut.prompt_token_ids) == len(whole.prompt_token_ids)
    assert len(cut.cuts) == 2


async def test_an_answer_that_may_fill_the_window_still_may(front: Front) -> None:
    """A word that is cut has one token more, and the answer one less."""
    whole = await front.chat(" extraordinary" * 100)
    cut = await front.chat(" extraordinary" * 50 + f" extra{SEPARATOR}ordinary" * 50)
    assert len(cut.prompt_token_ids) > len(whole.prompt_token_ids)
    left = {
        len(one.prompt_token_ids) + (decode_sampling(one.sampling).max_tokens or 0)
        for one in (whole, cut)
    }
    assert left == {512}


async def test_a_prompt_that_would_not_fit_in_segments_stays_whole(front: Front) -> None:
    text = " extraordinary" * 480
    whole = await front.chat(text, max_tokens=1)
    cut = await front.chat(text.replace("extra", f"extra{SEPARATOR}"), max_tokens=1)
    assert cut.prompt_token_ids == whole.prompt_token_ids
    assert cut.cuts == []


async def test_outside_rounds_separators_are_only_taken_out(front: Front) -> None:
    body = {"model": "m", "prompt": f"One{SEPARATOR} two", "max_tokens": 1}
    reply = await front.openai.complete(body, Origin())
    assert isinstance(reply, JsonReply)
    assert front.asked[-1].prompt_token_ids == front.encode("One two")
    assert front.asked[-1].cuts == []


async def test_more_segments_than_a_round_can_plan_are_refused(front: Front) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": f"a{SEPARATOR}" * 4097}]}
    reply = await front.openai.chat(body, MEMBER)
    assert isinstance(reply, JsonReply)
    assert reply.status == 400
    assert "4097 segments, expected at most 4096" in reply.body["error"]["message"]


async def test_a_tokenizer_that_begins_every_text_with_a_space_is_not_cut(front: Front) -> None:
    class Spacing:
        """As those are that come of SentencePiece."""

        def encode(self, text: str, **options: Any) -> list[str]:
            return [f" {text}"] if text else []

        def decode(self, tokens: list[str]) -> str:
            return "".join(tokens).removeprefix(" ")

    cutter = Cutter(Spacing())
    assert await cutter.cut([1, 2, 3], "ab", [["a", "b"]]) == ([1, 2, 3], [])
    cutter.close()


async def test_what_a_tokenizer_puts_in_front_stays_there(front: Front) -> None:
    class Beginning:
        """One that has a token for the beginning of a text."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*([0] if add_special_tokens else []), *map(ord, text)]

        def decode(self, tokens: list[int]) -> str:
            return "".join(map(chr, tokens))

    cutter = Cutter(Beginning())
    assert await cutter.cut([0, 97, 98], "ab", [["a", "b"]]) == ([0, 97, 98], [2])
    # A template that brings its own: it is part of the text.
    assert await cutter.cut([0, 97, 98], "\0ab", [["a", "b"]]) == ([0, 97, 98], [1, 2])
    cutter.close()
