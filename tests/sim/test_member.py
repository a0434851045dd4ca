"""Endpoints in trouble: what a request that fails says of itself.

The endpoint here is no model: it sends the given bytes to whoever connects, and hangs up.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from td_serve.errors import ReplayError
from td_serve.sim.member import MemberResult, Request, ask, connect, discover
from td_serve.types import AgentId

REQUEST = Request(
    model="m",
    agent=AgentId("Osk"),
    round=2,
    messages=[{"role": "user", "content": "And the river?"}],
    max_tokens=4,
    temperature=0.0,
    seed=0,
    td_round=None,
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
CHUNK = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"High"},"finish_reason":null}]}\n\n'
)


def body(status: str, json: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nx-should-retry: false\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(json) + json


@asynccontextmanager
async def endpoint(answer: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/v1"


async def answered(answer: bytes) -> MemberResult:
    seconds = iter(range(100))
    async with endpoint(answer) as url, connect(url) as client:
        return await ask(client, REQUEST, lambda: float(next(seconds)))


async def test_a_refusal_is_told_by_status_and_message() -> None:
    result = await answered(body("409 Conflict", b'{"error":{"message":"Osk\\nis here twice"}}'))
    assert result.error == "409: Osk is here twice"
    assert (result.agent, result.round, result.ttft_ms) == ("Osk", 2, None)


async def test_a_stream_that_ends_early_is_a_failure_with_what_came() -> None:
    result = await answered(HEAD + b"\r\n" + CHUNK + b"data: [DONE]\n\n")
    assert result.error == "the stream ended without a finish reason"
    assert result.text == "High"
    assert result.ttft_ms == 1000.0


async def test_a_connection_lost_in_the_middle_is_a_failure() -> None:
    result = await answered(HEAD + b"content-length: 9999\r\n\r\n" + CHUNK)
    assert result.error is not None
    assert result.error.startswith("connection failed: ")
    assert result.text == "High"


async def test_an_error_inside_the_stream_is_told() -> None:
    event = b'data: {"error":{"message":"the engine died","code":500}}\n\n'
    result = await answered(HEAD + b"\r\n" + CHUNK + event)
    assert result.error == "the engine died"


@pytest.mark.parametrize(
    ("models", "name", "said"),
    [
        (b"[]", None, r"serves no model"),
        (b'[{"id":"a"},{"id":"b"}]', None, r"serves \['a', 'b'\]: name one with --model"),
        (b'[{"id":"a"}]', "b", r"does not serve 'b': it serves \['a'\]"),
    ],
)
async def test_a_model_that_is_not_there_is_told(models: bytes, name: str, said: str) -> None:
    answer = body("200 OK", b'{"object":"list","data":' + models + b"}")
    async with endpoint(answer) as url, connect(url) as client:
        with pytest.raises(ReplayError, match=said):
            await discover(client, name)


async def test_a_model_card_may_be_silent_about_window_and_root() -> None:
    answer = body("200 OK", b'{"object":"list","data":[{"id":"a","object":"model"}]}')
    async with endpoint(answer) as url, connect(url) as client:
        model = await discover(client, None)
    assert (model.name, model.window, model.root) == ("a", None, None)


async def test_an_endpoint_that_lists_no_models_is_told_by_its_status() -> None:
    answer = body("401 Unauthorized", b'{"error":{"message":"no key"}}')
    async with endpoint(answer) as url, connect(url) as client:
        with pytest.raises(ReplayError, match=r"lists no models: 401: no key"):
            await discover(client, None)
