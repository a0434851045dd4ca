"""How long a deployment takes from its launch to its first token, and what memory it needs."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from td_serve.bench.memory import PeakMemory
from td_serve.bench.private_cluster import Served, served
from td_serve.bench.processes import descendants
from td_serve.errors import TdServeError

_START_PATIENCE_S = 300.0
_POLL_S = 0.1
_ANSWER_PATIENCE_S = 180.0

CHATS = 16
CHAT_WORDS = 465  # with the template about 500 tokens: each word is one in most vocabularies
CHAT_TOKENS = 32
_WORDS = ("the", "a", "of", "to", "and", "in", "is", "it", "on", "as", "with", "for", "was", "day")


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from launch to first token; memory at its peak under load, in GiB, by kind."""

    start_to_first_token_s: float
    rss_gib_by_kind: dict[str, float]


def measure_start(data: Mapping[str, Any], model: str, temp: Path, seed: int) -> Start:
    """Launch the cluster file `data`, wait for a token of `model`, load it, stop it.

    Raises TdServeError when it does not start or a request fails.
    """
    with served(data, temp) as server:
        _wait_for_token(server, model)
        seconds = time.perf_counter() - server.launched_at
        with PeakMemory(descendants) as memory:
            try:
                asyncio.run(_load(server.base, model, seed))
            except httpx.HTTPError as error:
                raise TdServeError(f"a chat failed: {error!r}; {server.last_words()}") from error
    return Start(start_to_first_token_s=round(seconds, 2), rss_gib_by_kind=memory.gib())


def _wait_for_token(server: Served, model: str) -> None:
    """Ask for a chat completion until one streams its first token."""
    with httpx.Client(base_url=server.base, timeout=_ANSWER_PATIENCE_S, trust_env=False) as client:
        while True:
            try:
                if _streams_a_token(client, model):
                    return
                said = "no token"
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError) as error:
                said = repr(error)
            except httpx.HTTPStatusError as error:
                said = str(error.response.status_code)
            server.check()
            if time.perf_counter() - server.launched_at > _START_PATIENCE_S:
                raise TdServeError(
                    f"no token within {_START_PATIENCE_S:.0f} s (last: {said}); "
                    + server.last_words()
                )
            time.sleep(_POLL_S)


def _streams_a_token(client: httpx.Client, model: str) -> bool:
    body = _chat(model, "Say something.", max_tokens=4, stream=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = line.removeprefix("data: ")
            if line == event or event == "[DONE]":
                continue
            choices = json.loads(event).get("choices") or [{}]
            if choices[0].get("delta", {}).get("content"):
                return True
    return False


async def _load(base: str, model: str, seed: int) -> None:
    """CHATS completions at once. Raises httpx.HTTPError when one fails."""
    words = random.Random(seed)
    texts = [" ".join(words.choices(_WORDS, k=CHAT_WORDS)) for _ in range(CHATS)]
    async with httpx.AsyncClient(
        base_url=base, timeout=_ANSWER_PATIENCE_S, trust_env=False
    ) as client:
        answers = await asyncio.gather(
            *(
                client.post(
                    "/v1/chat/completions",
                    json=_chat(model, text, max_tokens=CHAT_TOKENS, ignore_eos=True),
                )
                for text in texts
            )
        )
    for answer in answers:
        answer.raise_for_status()


def _chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **more,
    }
