"""One completion, three ways: by the replicas' handles, over HTTP, over HTTP in a round.

A fourth, the floor, asks for nothing that an engine would do.

All run in this process, ask the same engines and get the same sampling parameters. The answer
is one token: the engines then do the least that they can (a prefill, a read of its KV, one step),
and what is left is the way. Prompts are salted, way by way, so that no prefix cache helps whoever
comes second.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from typing import Any

import httpx
import msgspec
from ray import serve

from td_serve.bench.latency import Way
from td_serve.config import DispatchSettings
from td_serve.dispatch import Dispatcher
from td_serve.engine.codec import greedy_sampling
from td_serve.errors import TdServeError
from td_serve.metrics import silent_metrics
from td_serve.serve.engines import RayEngines
from td_serve.types import GenerateRequest, RequestId

MAX_TOKENS = 1
_ANSWER_PATIENCE_S = 120.0


class Ways:
    """The ways to the deployment `app` at `base`. Use with `async with`."""

    def __init__(self, base: str, app: str, model: str, most_in_flight: int) -> None:
        self._model = model
        self._http = httpx.AsyncClient(
            base_url=base,
            timeout=_ANSWER_PATIENCE_S,
            trust_env=False,
            limits=httpx.Limits(
                max_connections=most_in_flight, max_keepalive_connections=most_in_flight
            ),
        )
        self._dispatcher = Dispatcher(
            RayEngines(
                serve.get_deployment_handle("PrefillReplica", app),
                serve.get_deployment_handle("DecodeReplica", app),
                serve.get_deployment_handle("KVDirectory", app),
            ),
            DispatchSettings(),
            silent_metrics(),
        )
        self._sampling = greedy_sampling(MAX_TOKENS)

    async def __aenter__(self) -> Ways:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._dispatcher.drain()
        await self._http.aclose()

    async def wait_until_ready(self, patience_s: float) -> None:
        """Wait until the ingress answers and knows its engines. Raises TdServeError."""
        gives_up_at = time.monotonic() + patience_s
        said = ""
        while time.monotonic() < gives_up_at:
            try:
                answer = await self._http.get("/health")
                if answer.is_success:
                    return
                said = f"{answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as error:
                said = repr(error)
            await asyncio.sleep(0.2)
        raise TdServeError(f"the deployment is not ready after {patience_s:.0f} s: {said}")

    async def ask(
        self, way: Way, prompt: list[int], salt: str, *, show: bool = False
    ) -> list[int] | None:
        """Complete `prompt`. Gives the tokens if `show`; over HTTP they cost extra. FLOOR has none.

        Raises TdServeError when the request fails or its answer has another length.
        """
        if way is Way.DIRECT:
            return await self._ask_directly(prompt, salt)
        if way is Way.FLOOR:
            await self._answered(self._http.get("/v1/models"))
            return None
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        if show:
            body["return_token_ids"] = True
        if way is Way.ROUND:
            sim = f"bench-{uuid.uuid4().hex}"
            body["td_round"] = {"sim": sim, "agent": "a", "round": 0, "n_agents": 1}
        return await self._ask_over_http(body)

    async def _ask_directly(self, prompt: list[int], salt: str) -> list[int]:
        request = GenerateRequest(
            request_id=RequestId(f"bench-{uuid.uuid4().hex}"),
            prompt_token_ids=prompt,
            sampling=self._sampling,
            cache_salt=salt,
        )
        tokens: list[int] = []
        async for delta in self._dispatcher.generate(request):
            for choice in delta.choices:
                tokens += choice.token_ids
        _check_length(len(tokens))
        return tokens

    @staticmethod
    async def _answered(request: Awaitable[httpx.Response]) -> httpx.Response:
        try:
            answer = await request
        except httpx.HTTPError as error:
            raise TdServeError(f"a request failed: {error!r}") from error
        if answer.status_code != httpx.codes.OK:
            raise TdServeError(f"a request failed: {answer.status_code}: {answer.text[:500]}")
        return answer

    async def _ask_over_http(self, body: dict[str, Any]) -> list[int] | None:
        posted = self._http.post("/v1/completions", content=msgspec.json.encode(body))
        found = msgspec.json.decode((await self._answered(posted)).content)
        _check_length(found["usage"]["completion_tokens"])
        tokens: list[int] | None = found["choices"][0].get("token_ids")
        return tokens


def _check_length(tokens: int) -> None:
    if tokens != MAX_TOKENS:
        raise TdServeError(f"an answer has {tokens} tokens, expected {MAX_TOKENS}")
