"""One member's request: sent through the OpenAI client, streamed, timed."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from td_serve.errors import ReplayError
from td_serve.sim.layouts import Kind
from td_serve.types import AgentId

Clock = Callable[[], float]
"""Seconds from some fixed moment; never runs backwards."""

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 900.0
"""Between two events of a stream: the first token of a large round on a CPU takes minutes."""
MAX_RETRIES = 1
"""Of a request that found no server or was turned away with 408, 409, 429 or 5xx."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one member sends."""

    model: str
    agent: AgentId
    round: int
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int
    td_round: Mapping[str, Any] | None
    """The request's place in its round, for a server that knows rounds; None leaves it out."""


class Dropped(msgspec.Struct, frozen=True):
    """A part of a prompt that was left out to fit the window."""

    kind: Kind
    round: int
    agent: AgentId


class CutReport(msgspec.Struct, frozen=True):
    """What cutting did to a prompt, in tokens as counted before sending."""

    tokens_before: int
    tokens: int
    dropped: tuple[Dropped, ...]


class MemberResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one member's request.

    Times are in ms from sending. None: not known, or not reached.
    """

    agent: AgentId
    round: int
    ttft_ms: float | None = None
    """Until the first text arrived."""
    latency_ms: float | None = None
    """Until the stream ended."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, what the server says it did not compute."""
    completion_tokens: int | None = None
    decode_tok_s: float | None = None
    """Tokens after the first text, over the time from then to the end."""
    finish_reason: str | None = None
    cut: CutReport | None = None
    error: str | None = None
    """Why the request failed: status and message. None: it did not."""
    text: str | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """What the server says of a model."""

    name: str
    window: int | None
    """Tokens of prompt and output together (`max_model_len`)."""
    root: str | None
    """Where the server has it from: a directory, or a name."""


def connect(url: str, api_key: str | None = None) -> openai.AsyncOpenAI:
    """A client for the endpoint at `url` (`http://host:port/v1`).

    Without `api_key`, OPENAI_API_KEY is used, else 'none'. The environment's proxies are not: what
    is measured is the way to this very server.
    """
    timeout = openai.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return openai.AsyncOpenAI(
        base_url=url,
        api_key=api_key or os.environ.get("OPENAI_API_KEY") or "none",
        max_retries=MAX_RETRIES,
        timeout=timeout,
        http_client=openai.DefaultAsyncHttpxClient(timeout=timeout, trust_env=False),
    )


async def discover(client: openai.AsyncOpenAI, name: str | None) -> ServedModel:
    """The model called `name`, or the only one served when it is None.

    Raises:
        ReplayError: no server answers, it does not serve `name`, or there is a choice to make.
    """
    try:
        cards = [card async for card in client.models.list()]
    except openai.APIConnectionError as error:
        raise ReplayError(f"no server at {client.base_url}: {reason(error)}") from error
    except openai.OpenAIError as error:
        raise ReplayError(f"{client.base_url} lists no models: {reason(error)}") from error
    names = [card.id for card in cards]
    if name is None and len(cards) != 1:
        raise ReplayError(f"{client.base_url} serves {names or 'no model'}: name one with --model")
    for card in cards:
        if name in (None, card.id):
            extra = card.model_extra or {}
            window, root = extra.get("max_model_len"), extra.get("root")
            return ServedModel(
                name=card.id,
                window=window if isinstance(window, int) and window > 0 else None,
                root=root if isinstance(root, str) and root else None,
            )
    raise ReplayError(f"{client.base_url} does not serve {name!r}: it serves {names}")


async def ask(client: openai.AsyncOpenAI, request: Request, clock: Clock) -> MemberResult:
    """Send one request and read its stream to the end.

    A failure is a result with `error` set, and with what was measured before it; only being
    cancelled raises, after the stream was closed.
    """
    extra = {"td_round": dict(request.td_round)} if request.td_round is not None else None
    start = clock()
    stream = _Stream(clock)
    error: str | None = None
    try:
        async with await client.chat.completions.create(
            model=request.model,
            messages=cast("Sequence[ChatCompletionMessageParam]", request.messages),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        ) as chunks:
            async for chunk in chunks:
                stream.take(chunk)
        if stream.finish_reason is None:
            error = "the stream ended without a finish reason"
    except openai.OpenAIError as failure:
        error = reason(failure)
    return stream.result(request, start, error)


def reason(error: Exception) -> str:
    """Why a request failed, on one line: the status if there is one, and the server's message."""
    if isinstance(error, openai.APIStatusError):
        body = error.body
        message = body.get("message") if isinstance(body, dict) else None
        text = f"{error.status_code}: {message or error.message}"
    elif isinstance(error, openai.APITimeoutError):
        text = f"no answer within {REQUEST_TIMEOUT_S:g} s"
    elif isinstance(error, openai.APIConnectionError):
        cause = error.__cause__
        text = f"connection failed: {str(cause) or type(cause).__name__ if cause else error}"
    else:
        text = str(error)
    return " ".join(text.split())


class _Stream:
    """Gathers the chunks of one answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: float | None = None
        self._texts: list[str] = []
        self._usage: CompletionUsage | None = None
        self.finish_reason: str | None = None

    def take(self, chunk: Any) -> None:
        """Note one chunk. Only the last has usage, and it has no choice."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta.content:
                if self._first is None:
                    self._first = self._clock()
                self._texts.append(choice.delta.content)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason

    def result(self, request: Request, start: float, error: str | None) -> MemberResult:
        """The answer up to now, which ends now."""
        end = self._clock()
        usage = self._usage
        details = usage.prompt_tokens_details if usage is not None else None
        completion = usage.completion_tokens if usage is not None else None
        rate: float | None = None
        if self._first is not None and completion is not None and completion > 1:
            seconds = end - self._first
            rate = (completion - 1) / seconds if seconds > 0 else math.inf
        return MemberResult(
            agent=request.agent,
            round=request.round,
            ttft_ms=1e3 * (self._first - start) if self._first is not None else None,
            latency_ms=1e3 * (end - start),
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=details.cached_tokens if details is not None else None,
            completion_tokens=completion,
            decode_tok_s=rate if rate is not None and math.isfinite(rate) else None,
            finish_reason=self.finish_reason,
            error=error,
            text="".join(self._texts),
        )
