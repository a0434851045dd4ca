"""What a client has done wrong comes back from a deployment's methods as a value."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator

import pytest

from td_serve.errors import BadRequest, RequestError, RoundConflict, Unavailable
from td_serve.serve.calls import returning_refusals

REFUSED = BadRequest("n: -1, expected at least 1", field="n")


class Plain:
    def __init__(self) -> None:
        self.closed = 0

    async def ask(self, error: Exception | None = None) -> str:
        if error is not None:
            raise error
        return "answered"

    async def stream(self, error: Exception | None = None) -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
            if error is not None:
                raise error
        finally:
            self.closed += 1

    def at_once(self, error: Exception) -> None:
        raise error


@returning_refusals
class Deployed(Plain):
    """What it inherits is meant, too."""


@pytest.mark.parametrize("error", [REFUSED, RoundConflict("twice")])
async def test_a_refusal_is_returned_as_it_is(error: RequestError) -> None:
    deployed = Deployed()
    assert await deployed.ask() == "answered"
    assert [part async for part in deployed.stream()] == [1, 2]
    assert await deployed.ask(error) is error
    assert [part async for part in deployed.stream(error)] == [1, 2, error]
    found = pickle.loads(pickle.dumps(await deployed.ask(error)))
    assert (type(found), found.message, found.field) == (type(error), error.message, error.field)


@pytest.mark.parametrize("error", [Unavailable("nobody there"), ValueError("a fault of ours")])
async def test_whatever_else_goes_wrong_is_raised(error: Exception) -> None:
    deployed = Deployed()
    with pytest.raises(type(error)):
        await deployed.ask(error)
    with pytest.raises(type(error)):
        [part async for part in deployed.stream(error)]
    with pytest.raises(BadRequest):
        deployed.at_once(REFUSED)


async def test_a_stream_that_is_left_is_closed() -> None:
    deployed = Deployed()
    stream = deployed.stream()
    assert await anext(stream) == 1
    await stream.aclose()
    assert deployed.closed == 1


async def test_what_a_class_inherits_from_stays_as_it_is() -> None:
    with pytest.raises(BadRequest):
        await Plain().ask(REFUSED)
