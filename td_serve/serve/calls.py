"""Calls to Serve deployments: packed structs there and back, and Ray's failures as ours.

Every call is a Serve request of its own. Serve tells requests apart by an id that it takes from the
request in whose context a call is made, so that two calls out of one HTTP request would share it:
the router then hands out a replica to one of them and leaves the other waiting for ever. In a fresh
context each gets its own id. What Serve would then do for us, cancel calls when the request they
came from is cancelled, is done here: whoever stops waiting for a call cancels it.

Whatever a method raises Serve logs, with its traceback, as a failure of the replica. What a client
has done wrong is none: such a method returns its error in place of raising it
(`returning_refusals`), and here it is raised again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from td_serve.errors import EngineFailure, ReplicaLost, RequestError, Unavailable
from td_serve.types import M, unpack

K = TypeVar("K", bound=type)


def returning_refusals(kind: K) -> K:
    """Have the asynchronous methods that a deployment offers return, or yield at the end, the
    RequestErrors that are the client's fault (400 to 499). Mutates the class."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_"):
            continue
        if inspect.isasyncgenfunction(method):
            setattr(kind, name, _streaming(method))
        elif inspect.iscoroutinefunction(method):
            setattr(kind, name, _answering(method))
    return kind


def _answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def answering(*arguments: Any) -> Any:
        try:
            return await method(*arguments)
        except RequestError as error:
            return _if_refusal(error)

    return answering


def _streaming(
    method: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    @functools.wraps(method)
    async def streaming(*arguments: Any) -> AsyncGenerator[Any, None]:
        try:
            async with contextlib.aclosing(method(*arguments)) as parts:
                async for part in parts:
                    yield part
        except RequestError as error:
            yield _if_refusal(error)

    return streaming


def _if_refusal(error: RequestError) -> RequestError:
    """The error, if it is the client's fault; else raises it."""
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return error
    raise error


def _accepted(answer: Any) -> Any:
    """What a replica answers, unless that is a refusal, which is raised."""
    if isinstance(answer, RequestError):
        raise answer
    return answer


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
        return _accepted(await response)


async def stream(
    method: DeploymentHandle, kind: type[M], *arguments: Any
) -> AsyncGenerator[M, None]:
    """What a replica streams, unpacked. Closing it cancels the call in the replica."""
    responses: Any = start(method.options(stream=True), *arguments)
    finished = False
    try:
        with _translated():
            async for packed in responses:
                yield unpack(_accepted(packed), kind)
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
