"""A prefill engine's host, when members share what turns have put out: their KV as it was decoded.

The decode engine keeps a turn's blocks under a lease. Of those only the ones are read that hold the
output: a request of ours stands in for them, as long as they are, under a salt that nobody else
has. What it computes itself (one token, since vLLM wants one) nobody reads.
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
from td_serve.errors import RequestError, Unavailable
from td_serve.types import GenerateRequest, Handle, Handover, LeaseId, PassSpec, RequestId, Written

log = logging.getLogger(__name__)

_LOOKS_UP_S = 0.005
_AT_ONCE = 4
"""Reads: each has a lease held, of which not all may be at the same time."""
_COMES_S = 1.0
"""How long after its request has ended an output may take to be there: a step of the engine."""

Prefill = Callable[[GenerateRequest, Mapping[str, Any]], Awaitable[Handover]]
"""A prefill with these KV transfer parameters."""


class Outputs:
    """What turns have put out, brought into one prefill engine."""

    def __init__(self, prefill: Prefill, reading: Reading, passes: RoundPasses) -> None:
        self._prefill = prefill
        self._reading = reading
        self._passes = passes
        self._turn = asyncio.Semaphore(_AT_ONCE)

    @contextlib.asynccontextmanager
    async def of(self, spec: PassSpec, turns: Mapping[str, Handle]) -> AsyncIterator[list[Written]]:
        """What has come of what is written of a pass's canonical sequence; it is there within.

        What cannot be read is not among it. Raises Unavailable.
        """
        wanted = [one for one in spec.written if one.lease in turns]
        leases = [one.lease for one in wanted]
        try:
            tokens = spec.canonical.token_ids
            tasks = [
                asyncio.ensure_future(self._bring(one, turns[one.lease], tokens)) for one in wanted
            ]
            try:
                came = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            there = await self._wait_for(
                [one for one, here in zip(leases, came, strict=True) if here]
            )
            written = [one for one in wanted if one.lease in there]
            log.info("%d of %d outputs were read as they were decoded", len(written), len(wanted))
            yield written
        finally:
            if leases:
                self._passes.drop_written(leases)

    async def _bring(self, written: Written, handle: Handle, tokens: Sequence[int]) -> bool:
        """Read what is written into the engine. Says whether that was done. Raises Unavailable."""
        piece = written.piece
        size = handle.block_size
        first, end = piece.start // size, piece.start + piece.tokens
        if first < handle.skipped or end > handle.tokens:
            return False
        before = piece.start - first * size
        here = slice(first - handle.skipped, -(-end // size) - handle.skipped)
        part = msgspec.structs.replace(
            handle,
            block_ids=[group[here] for group in handle.block_ids],
            tokens=before + piece.tokens,
            digests=b"",
            tail=[],
        )
        name = uuid.uuid4().hex
        put_out = tokens[piece.source : piece.source + piece.tokens]
        request = GenerateRequest(
            request_id=RequestId(f"output-{name}"),
            # What stands around the output is not asked for, but has its place.
            prompt_token_ids=[*([0] * before), *put_out, 0],
            sampling=greedy_sampling(1),
            cache_salt=f"output:{name}",
        )
        output = Output(written.lease, before, piece.tokens, piece.start)
        try:
            async with (
                self._turn,
                self._reading.held(handle, part, request.request_id, 1) as source,
            ):
                if not source:
                    return False
                parameters = {**source, READ_ONLY: True, **output_parameters(output)}
                read = (await self._prefill(request, parameters)).read
        except Unavailable:
            raise
        except RequestError as error:
            log.warning("lease %s: the output is not read: %s", handle.lease, error.message)
            return False
        return read is not None and not read.failed and read.tokens == part.tokens

    async def _wait_for(self, leases: Sequence[LeaseId]) -> set[LeaseId]:
        """Those that are there, once all are or it has taken too long."""
        there: set[LeaseId] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMES_S):
                while len(there) < len(set(leases)):
                    there = await self._passes.have_written(leases)
                    await asyncio.sleep(_LOOKS_UP_S)
        return there
