"""A prefill engine's host, when members share what turns have put out: their KV as it was decoded.

The decode engine keeps a turn's blocks under a lease. Of those only the ones are read that hold the
output: a request of ours stands in for them, as long as they are, under a salt that nobody else
has. What it computes itself (one token, since vLLM wants one) nobody reads; if it could not read,
nobody uses what it has computed instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from td_serve.engine.codec import greedy_sampling
from td_serve.engine.passes import RoundPasses
from td_serve.engine.reading import Reading
from td_serve.engine.reads import READ_ONLY
from td_serve.engine.restoring import Output, output_parameters
from td_serve.errors import RequestError
from td_serve.types import GenerateRequest, Handle, Handover, PassSpec, Read, RequestId, Written

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Reads: each has a lease held, of which not all may be at the same time."""
_ANSWERS = 10
"""After so many answers of its worker an engine has taken a step, in which outputs are taken out of
its pages; two do, if nothing else is asked meanwhile."""

Load = Callable[[GenerateRequest, Mapping[str, Any]], Awaitable[Handover]]
"""A prefill whose KV comes from what these KV transfer parameters name."""


class Outputs:
    """What turns have put out, brought into one prefill engine."""

    def __init__(self, load: Load, reading: Reading, passes: RoundPasses) -> None:
        self._load = load
        self._reading = reading
        self._passes = passes
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._reads: list[Read] = []

    def take_reads(self) -> list[Read]:
        """The reads that have been made since this was asked last."""
        reads, self._reads = self._reads, []
        return reads

    @contextlib.asynccontextmanager
    async def of(
        self, spec: PassSpec, turns: Mapping[str, Handle], name: str
    ) -> AsyncIterator[list[Written]]:
        """What has come of what is written of a pass's canonical sequence; it is there within.

        What cannot be read within the reads' patience, or cannot at all, is not among it; `name`
        says whose pass it is, for the log.
        """
        brought: list[Written] = []
        names: dict[str, Written] = {}
        """What each is called in the engine, whether it comes or not: whatever comes is dropped."""
        try:
            with contextlib.suppress(RequestError):  # then all of it is computed, or all fails
                known = await self._passes.known(spec.canonical)
                wanted = [one for one in spec.written if _end(one) > known]
                names = {f"{one.name}-{uuid.uuid4().hex}": one for one in wanted}
                read = await self._bring_all(names, turns, spec.canonical.token_ids, name)
                brought = await self._those_there(read)
                log.info(
                    "%s: %d of %d outputs were read as they were decoded",
                    name,
                    len(brought),
                    len(wanted),
                )
            yield brought
        finally:
            if names:
                self._passes.drop_written(list(names))

    async def _bring_all(
        self,
        wanted: Mapping[str, Written],
        turns: Mapping[str, Handle],
        tokens: Sequence[int],
        name: str,
    ) -> list[Written]:
        """Read what is wanted; what could be read in time, by its name in the engine."""
        tasks = [
            asyncio.ensure_future(self._bring(as_read, one, turns[one.name], tokens, name))
            for as_read, one in wanted.items()
            if one.name in turns
        ]
        if not tasks:
            return []
        try:
            done, late = await asyncio.wait(tasks, timeout=self._reading.settings.read_patience_s)
        finally:
            for task in tasks:
                task.cancel()
        if late:
            log.warning("%s: %d outputs could not be read in time", name, len(late))
        came = [task.result() for task in tasks if task in done]
        return [one for one in came if one is not None]

    async def _bring(
        self, as_read: str, written: Written, handle: Handle, tokens: Sequence[int], name: str
    ) -> Written | None:
        """Read what is written into the engine, where it is called `as_read`; None where that could
        not be done."""
        piece = written.piece
        size = handle.block_size
        first, end = piece.start // size, piece.start + piece.tokens
        if first < handle.skipped or end > handle.tokens:
            return None
        before = piece.start - first * size
        here = slice(first - handle.skipped, -(-end // size) - handle.skipped)
        part = msgspec.structs.replace(
            handle,
            block_ids=[group[here] for group in handle.block_ids],
            tokens=before + piece.tokens,
            digests=b"",
            tail=[],
        )
        put_out = tokens[piece.source : piece.source + piece.tokens]
        request = GenerateRequest(
            request_id=RequestId(f"output-{as_read}"),
            # What stands around the output is not asked for, but has its place.
            prompt_token_ids=[*([0] * before), *put_out, 0],
            sampling=greedy_sampling(1),
            cache_salt=f"output:{as_read}",
        )
        output = Output(as_read, before, piece.tokens, piece.start)
        read = None
        is_good = False
        try:
            async with (
                self._turn,
                self._reading.held(handle, request.request_id) as until,
            ):
                if until is None:
                    log.info("%s: lease %s is not kept, or not to be read now", name, handle.lease)
                    return None
                source = self._reading.source(part, until, 1)
                parameters = {**source, READ_ONLY: True, **output_parameters(output)}
                read = (await self._load(request, parameters)).read
                is_good = read is not None and not read.failed and read.tokens == part.tokens
        except RequestError as error:
            log.warning("%s: lease %s is not read: %s", name, handle.lease, error.message)
            return None
        finally:
            if read is not None:
                self._reads.append(read)
            if not is_good:  # what has come is not what was put out
                self._passes.drop_written([as_read])
        if not is_good:
            log.warning("%s: lease %s could not be read in time", name, handle.lease)
            return None
        return Written(name=as_read, piece=piece)

    async def _those_there(self, brought: Sequence[Written]) -> list[Written]:
        """Those that have been taken out of the engine's pages. Raises Unavailable or
        EngineFailure."""
        names = {one.name for one in brought}
        there: set[str] = set()
        for _ in range(_ANSWERS):
            if names <= there:
                break
            there = await self._passes.written()
        return [one for one in brought if one.name in there]


def _end(written: Written) -> int:
    return written.piece.source + written.piece.tokens
