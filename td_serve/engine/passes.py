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

from td_serve.engine.restoring import RESTORE, Ready, digest
from td_serve.tasks import Tasks
from td_serve.types import (
    GenerateRequest,
    MemberPass,
    PassResult,
    PassSpec,
    RequestId,
    pack,
    unpack,
)

log = logging.getLogger(__name__)


class Made(msgspec.Struct, frozen=True):
    """What a pass has made ready for a member: `tokens` of its prompt, `spared` of them without
    computing anything."""

    name: RequestId
    tokens: int
    digest: str
    spared: int

    def parameters(self) -> dict[str, Any]:
        """The KV transfer parameters with which the member's request loads it."""
        ready = Ready(name=self.name, tokens=self.tokens, digest=self.digest)
        return {RESTORE: msgspec.to_builtins(ready)}

    def salt(self, request: GenerateRequest) -> str:
        """What the request's KV is found under from then on: by nobody else, and by no exact one.

        Never empty, and never what a client could send: those have no request's own name.
        """
        return f"round:{self.name}:{request.cache_salt or ''}"


class RoundPasses:
    """The passes of one engine. `slice_s` is how long the engine may be kept from its steps."""

    def __init__(self, llm: AsyncLLM, slice_s: float) -> None:
        self._llm = llm
        self._slice_s = slice_s
        self._turn = asyncio.Lock()
        self._tasks = Tasks()

    async def make(self, spec: PassSpec) -> dict[RequestId, Made]:
        """Run a pass; by member what it has made. Empty where it failed: all is computed then."""
        async with self._turn:
            try:
                result = await self._run(spec)
            except Exception as error:  # noqa: BLE001 - whatever it was, members are served
                log.warning("a pass failed, its members are served alone: %s", error)
                return {}
        return {member.request_id: _made(member, result) for member in spec.members}

    async def mirrors(self) -> int:
        """For how many members the engine keeps what passes have made."""
        (count,) = await self._llm.collective_rpc("td_mirrors")
        return int(count)

    def give_up(self, spec: PassSpec, making: asyncio.Future[Any]) -> None:
        """Nobody wants anything of this pass any more, whether it has come to its end or not."""
        making.cancel()
        self._tasks.run(self._release_soon([member.request_id for member in spec.members]))

    async def release(self, names: Sequence[RequestId]) -> None:
        """Nobody will load what was made for these."""
        await self._llm.collective_rpc("td_release", args=(list(names),))

    async def _release_soon(self, names: Sequence[RequestId]) -> None:
        """After a pass that is being given up has ended."""
        async with self._turn:
            with contextlib.suppress(Exception):  # of an engine that has died nothing is left
                await self.release(names)

    async def _run(self, spec: PassSpec) -> PassResult:
        ended = False
        try:
            # Whoever is cancelled here has sent it all the same.
            await self._llm.collective_rpc("td_begin", args=(pack(spec),))
            while True:
                answers = await self._llm.collective_rpc("td_step", args=(self._slice_s,))
                if answers[0] is not None:
                    ended = True
                    return unpack(answers[0], PassResult)
        finally:
            if not ended:
                with contextlib.suppress(Exception):
                    await self._llm.collective_rpc("td_abort")
                    # It may have come to its end before it was aborted.
                    await self.release([member.request_id for member in spec.members])


def _made(member: MemberPass, result: PassResult) -> Made:
    counted = result.members[member.request_id]
    return Made(
        name=member.request_id,
        tokens=counted.prompt,
        digest=digest(member.token_ids),
        spared=counted.local + counted.reused,
    )
