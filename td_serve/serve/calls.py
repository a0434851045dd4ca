"""Calls to Serve deployments: packed structs there and back, and Ray's failures as ours.

Every call is a Serve request of its own. Serve tells requests apart by an id that it takes from the
request in whose context a call is made, so that two calls out of one HTTP request would share it:
the router then hands out a replica to one of them and leaves the other waiting for ever. In a fresh
context each gets its own id. What Serve would then do for us, cancel calls when the request they
came from is cancelled, is done here: whoever stops waiting for a call cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from td_serve.errors import EngineFailure, ReplicaLost, RequestError, Unavailable
from td_serve.types import M, unpack


def start(method: DeploymentHandle, *arguments: Any) -> DeploymentResponse:
    """Make a call (`handle.method`) and do not wait for it."""
    return contextvars.Context().run(method.remote, *arguments)


async def ask(method: DeploymentHandle, *arguments: Any) -> Any:
    """What a replica answers. Raises a RequestError for whatever goes wrong."""
    response = start(method, *arguments)
    try:
        return await answer(response)
    except asyncio.CancelledError:
        response.cancel()
        raise


async def answer(response: DeploymentResponse) -> Any:
    """The answer to a call that was started."""
    with _translated():
        return await response


async def stream(
    method: DeploymentHandle, kind: type[M], *arguments: Any
) -> AsyncGenerator[M, None]:
    """What a replica streams, unpacked. Closing it cancels the call in the replica."""
    responses: Any = start(method.options(stream=True), *arguments)
    finished = False
    try:
        with _translated():
            async for packed in responses:
                yield unpack(packed, kind)
        finished = True
    finally:
        if not finished:
            responses.cancel()


async def ask_all(handle: DeploymentHandle, method: str, *arguments: Any) -> list[Any]:
    """What every replica of a deployment answers.

    Raises Unavailable when one does not, after all the others have.
    """
    responses = contextvars.Context().run(handle.broadcast, method, *arguments)
    with _translated():
        answers = await responses.results_async(return_exceptions=True)
    if failures := [one for one in answers if isinstance(one, BaseException)]:
        raise Unavailable(
            f"{method}: {len(failures)} of {len(answers)} replicas did not answer; the others "
            f"have done it: {_first_line(failures[0])}"
        )
    return answers


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Errors of ours that a replica raised come out as they were; Ray's become ours."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RequestError):
            raise error.cause from None
        raise EngineFailure(f"a replica failed: {error.cause!r}") from error
    except (RequestCancelledError, TaskCancelledError) as error:
        raise Unavailable("the call was cancelled in the replica") from error
    except (RayServeException, RayError) as error:
        # Dead actors and nodes, deployments without replicas, queues that are full.
        raise ReplicaLost(f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
