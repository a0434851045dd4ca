"""A prefill engine's host, when members of a round are prefilled by one pass.

`worker` is the other half, in the engine's own process. A pass goes on in slices between the
engine's steps, so that other requests are served meanwhile; passes follow one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from td_serve.engine.restoring import ready_parameters
from td_serve.engine.sparing import Sparing
from td_serve.errors import EngineFailure, RequestError, Unavailable
from td_serve.segments import alike
from td_serve.tasks import Tasks
from td_serve.types import (
    Canonical,
    GenerateRequest,
    MemberPass,
    PassResult,
    PassSpec,
    PassTokens,
    RequestId,
    Rule,
    RuleName,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

_LOOKS_UP_S = 1.0
"""How often whoever waits for an answer looks whether the engine lives."""


class Made(msgspec.Struct, frozen=True):
    """What a pass has made ready for a member: the KV of the first `tokens` of its prompt, counted
    by where it came from."""

    name: RequestId
    tokens: list[int]
    counted: PassTokens

    def parameters(self) -> dict[str, Any]:
        """The KV transfer parameters with which the member's request loads it."""
        return ready_parameters(self.name, self.tokens)

    def salt(self, request: GenerateRequest) -> str:
        """What the request's KV is found under from then on: by nobody else, and by no exact one.

        Never empty, and never what a client could send: those have no request's own name.
        """
        return f"round:{self.name}:{request.cache_salt or ''}"


class RoundPasses:
    """The passes of one engine, one after the other.

    `slice_s` is how long a pass goes on before the engine may take a step; a layer of a batch of
    rows (`worker`) is not interrupted. Raises Unavailable from every call once the engine has died.
    """

    def __init__(self, llm: AsyncLLM, slice_s: float) -> None:
        self._llm = llm
        self._slice_s = slice_s
        self._turn = asyncio.Lock()
        self._tasks = Tasks()
        self._sparing = Sparing()
        self._preparing: tuple[Canonical, asyncio.Task[PassResult]] | None = None
        self._is_asked = False
        self.known_why: str | None = None
        """Why there are no passes, once it has been asked."""

    async def why_none(self) -> str | None:
        """Why this engine makes no passes; None if it does. Raises Unavailable."""
        if not self._is_asked:
            try:
                answers = await self._call_all("td_why_no_passes")
                self.known_why = next((one for one in answers if one is not None), None)
            except Unavailable:
                raise
            except Exception as error:  # noqa: BLE001 - vLLM has no other type for a worker's error
                self.known_why = f"its worker cannot tell: {error!r}"
            self._is_asked = True
        return self.known_why

    def fits(self, canonical: Canonical) -> bool:
        """Whether a canonical sequence is within the model's window; no pass is made of a longer
        one."""
        return len(canonical.token_ids) <= int(self._llm.model_config.max_model_len)

    async def make(self, spec: PassSpec, name: str) -> dict[RequestId, Made]:
        """Run a pass; by member what it has made. `name` says which it is, for the log.

        Who is not there is prefilled alone: the pass failed, or there are none, or too much of what
        it took over would have to be computed anew. Raises Unavailable.
        """
        if await self.why_none() is not None or self._sparing.spares(spec.canonical.key):
            return {}
        async with self._turn:
            try:
                result = await self._run(spec)
            except Unavailable:
                raise
            except Exception as error:  # noqa: BLE001 - vLLM has no other type for a worker's error
                log.warning(
                    "%s: the pass failed, its %d members are prefilled alone: %r",
                    name,
                    len(spec.members),
                    error,
                )
                return {}
        log.info(
            "%s: of %d tokens in one order for all, %d were computed",
            name,
            len(spec.canonical.token_ids),
            result.canonical,
        )
        self._sparing.learn(spec.canonical.key, was_for_nothing=not result.members)
        if alone := len(spec.members) - len(result.members):
            log.info(
                "%s: %d of %d members are prefilled alone: too much of what they share would have "
                "to be computed anew",
                name,
                alone,
                len(spec.members),
            )
        return {
            member.request_id: _made(member, result.members[member.request_id])
            for member in spec.members
            if member.request_id in result.members
        }

    async def will_make(self, spec: PassSpec) -> bool:
        """Whether `make` would run this pass, as far as is known. Raises Unavailable."""
        return await self.why_none() is None and not self._sparing.will_spare(spec.canonical.key)

    async def known(self, canonical: Canonical) -> int:
        """How many tokens of a canonical sequence the engine keeps from its beginning on.

        Raises Unavailable or EngineFailure.
        """
        return int(await self._ask("td_known", canonical.key, canonical.token_ids))

    async def written(self) -> set[str]:
        """The outputs of turns that the engine has, for passes to take over.

        Raises Unavailable or EngineFailure.
        """
        return set(await self._ask("td_written"))

    def drop_written(self, names: Sequence[str]) -> None:
        """No pass will take these outputs over."""
        self._tasks.run(self._drop_written(names))

    async def _drop_written(self, names: Sequence[str]) -> None:
        with contextlib.suppress(RequestError):  # what a dead engine kept is gone
            await self._ask("td_drop_written", list(names))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """`_call`, with a worker's error as EngineFailure."""
        try:
            return await self._call(method, *arguments)
        except Unavailable:
            raise
        except Exception as error:
            raise EngineFailure(f"{method}: {error!r}") from error

    async def prepare(self, canonical: Canonical) -> None:
        """Compute a canonical sequence for a pass that is to come, unless one is under way.

        `give_way` puts an end to it. Raises Unavailable.
        """
        if await self.why_none() is not None or self._turn.locked():
            return
        if not self.fits(canonical) or self._sparing.will_spare(canonical.key):
            return
        spec = PassSpec(canonical=canonical, rule=Rule(name=RuleName.NONE), members=[])
        async with self._turn:
            running = asyncio.get_running_loop().create_task(self._run(spec))
            self._preparing = (canonical, running)
            try:
                await asyncio.wait({running})
            finally:
                self._preparing = None
                _end(running)
                (ended,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(ended, Unavailable):
            raise ended
        if isinstance(ended, Exception):
            log.warning("what a next round shares was not prepared: %r", ended)
        elif isinstance(ended, PassResult) and ended.canonical:
            log.info("%d tokens were prepared for a next round", ended.canonical)

    def give_way(self, wanted: Sequence[Canonical] = ()) -> None:
        """There is something else to do: end a preparation that is of none of `wanted`."""
        if self._preparing is None:
            return
        guess, running = self._preparing
        for one in wanted:
            shorter = min(len(one.token_ids), len(guess.token_ids))
            if one.key == guess.key and alike(one.token_ids, guess.token_ids) == shorter:
                return
        _end(running)

    async def mirrors(self) -> int:
        """For how many members the engine keeps what passes have made."""
        return 0 if await self.why_none() is not None else int(await self._call("td_mirrors"))

    def release(self, name: RequestId) -> None:
        """What was made for this member has been loaded, or will not be."""
        self._tasks.run(self._release([name]))

    def give_up(self, spec: PassSpec, making: asyncio.Future[Any]) -> None:
        """Nobody wants anything of this pass any more, whether it has come to its end or not."""
        making.cancel()
        self._tasks.run(self._release_after(spec, making))

    async def _release_after(self, spec: PassSpec, making: asyncio.Future[Any]) -> None:
        await asyncio.gather(making, return_exceptions=True)
        await self._release([member.request_id for member in spec.members])

    async def _release(self, names: Sequence[RequestId]) -> None:
        with contextlib.suppress(Unavailable):  # what a dead engine kept is gone
            if await self.why_none() is None:
                await self._call("td_release", list(names))

    async def _run(self, spec: PassSpec) -> PassResult:
        ended = False
        try:
            # Whoever is cancelled here has sent it all the same.
            await self._call("td_begin", pack(spec))
            while (packed := await self._call("td_step", self._slice_s)) is None:
                pass
            ended = True
            return unpack(packed, PassResult)
        finally:
            if not ended:
                with contextlib.suppress(Unavailable):
                    await self._call("td_abort")

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call every worker: all make the same passes, each with its heads, and say the same."""
        return (await self._call_all(method, *arguments))[0]

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call every worker. vLLM leaves such a call unanswered when the engine dies."""
        call = asyncio.ensure_future(self._llm.collective_rpc(method, args=arguments))
        try:
            while not (await asyncio.wait({call}, timeout=_LOOKS_UP_S))[0]:
                await self._llm.check_health()
            return list(call.result())
        except EngineDeadError as error:
            raise Unavailable("the engine has died") from error
        finally:
            call.cancel()


def _end(running: asyncio.Task[PassResult]) -> None:
    """Cancel a pass, once: it must not be cancelled while it tells the worker."""
    if not running.cancelling():
        running.cancel()


def _made(member: MemberPass, counted: PassTokens) -> Made:
    return Made(name=member.request_id, tokens=member.token_ids, counted=counted)
