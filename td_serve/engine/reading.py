"""A prefill engine's host, when it reads leased KV: what, whether that pays, and under which hold.

`reads` is the other half, in the engine's own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from td_serve.breakeven import BreakEven
from td_serve.config import ConversationConfig
from td_serve.engine.reads import DEADLINE, LEAST
from td_serve.errors import RequestError
from td_serve.handles import Keeper, common_tokens, shorten
from td_serve.tasks import Tasks
from td_serve.types import GenerateRequest, Handle, Read, ReaderId, ReplicaId, RequestId

log = logging.getLogger(__name__)

_THRESHOLD_BEFORE = 64
"""Of `kv_recompute_threshold: auto`, until enough has been measured."""


class Reading:
    """What one prefill engine reads. Without a `keeper` to ask, that is nothing.

    `block_size` and `tp_size` are the engine's own: handles of others are left alone.
    """

    def __init__(
        self, keeper: Keeper | None, settings: ConversationConfig, block_size: int, tp_size: int
    ) -> None:
        self.keeper = keeper
        self.settings = settings
        self._shape = (block_size, tp_size)
        self._break_even = BreakEven(_THRESHOLD_BEFORE)
        self._peers: set[ReplicaId] = set()
        self._tasks = Tasks()

    @contextlib.asynccontextmanager
    async def of(
        self, request: GenerateRequest, handle: Handle | None
    ) -> AsyncIterator[dict[str, Any]]:
        """The KV transfer parameters with which `request` reads what it has of `handle`.

        Empty where there is nothing to read. The blocks are held within, for `read_patience_s` at
        most, and let go at its end.
        """
        tokens = 0 if handle is None else self._tokens(request, handle)
        if handle is None or tokens == 0:
            yield {}
            return
        async with self.held(handle, request.request_id) as until:
            # What is held is as it was granted: it has the tokens that it says.
            yield (
                {}
                if until is None
                else self.source(shorten(handle, tokens), until, self.least_tokens or 1)
            )

    @contextlib.asynccontextmanager
    async def held(self, handle: Handle, request_id: RequestId) -> AsyncIterator[float | None]:
        """Until when (CLOCK_MONOTONIC, seconds) a handle's blocks are kept for a request.

        None where they are not kept (any more), or not like this engine's. Held and let go as in
        `of`.
        """
        if self.keeper is None or not self.fits(handle):
            yield None
            return
        reader = ReaderId(f"{request_id}-{uuid.uuid4().hex[:8]}")
        # Begun before asking: the hold lasts at least as long on the engine that grants it.
        began = time.monotonic()
        patience_s = self.settings.read_patience_s
        asking = asyncio.ensure_future(self.keeper.hold(handle, reader, patience_s))
        try:
            held = await self._is_held(handle, began, asking)
            yield began + patience_s if held else None
        finally:
            self._tasks.run(self._let_go(self.keeper, handle, reader, asking))

    def learn(self, computed: int, took_s: float, read: Read | None, handle: Handle | None) -> None:
        """A prefill of `computed` tokens took so long, what it has `read` of `handle` included."""
        if read is None:
            self._break_even.computed(computed, took_s)
        elif not read.failed and handle is not None:  # or what took how long cannot be told apart
            self._break_even.computed(computed, took_s - read.seconds)
            if handle.replica in self._peers:
                self._break_even.read(read.tokens, read.seconds)
            # The first read of a peer is a handshake too.
            self._peers.add(handle.replica)

    @property
    def least_tokens(self) -> int | None:
        """How many tokens must be there to be read; None: reading never pays."""
        if self.settings.kv_recompute_threshold == "auto":
            return self._break_even.tokens
        return max(1, self.settings.kv_recompute_threshold)

    def fits(self, handle: Handle) -> bool:
        """Whether a handle's blocks are like this engine's."""
        return (handle.block_size, handle.tp_size) == self._shape

    def _tokens(self, request: GenerateRequest, handle: Handle) -> int:
        """How many of a handle's tokens can be read and are worth it."""
        least = self.least_tokens
        if least is None or self.keeper is None or not self.fits(handle):
            return 0
        tokens = common_tokens(handle, request.prompt_token_ids, request.cache_salt)
        return tokens if tokens >= least else 0

    async def _is_held(self, handle: Handle, began: float, asking: asyncio.Future[bool]) -> bool:
        try:
            held = await asyncio.shield(asking)
        except RequestError as error:
            log.warning("lease %s is not read: %s", handle.lease, error.message)
            return False
        self._break_even.asked(time.monotonic() - began)
        return held

    @staticmethod
    def source(handle: Handle, until: float, least: int) -> dict[str, Any]:
        """The KV transfer parameters with which a request reads a handle's blocks, all of them,
        before `until`; where fewer than `least` tokens are missing, it computes them."""
        return {
            "remote_engine_id": handle.replica,
            # The reading engine names it when it has read. As a heartbeat's it is ignored: leases
            # end by themselves, not by being read.
            "remote_request_id": f"HB:{handle.lease}",
            "remote_host": handle.host,
            "remote_port": handle.port,
            "remote_block_ids": handle.block_ids,
            "remote_num_tokens": handle.tokens,
            "tp_size": handle.tp_size,
            DEADLINE: until,
            LEAST: least,
        }

    @staticmethod
    async def _let_go(
        keeper: Keeper, handle: Handle, reader: ReaderId, asking: asyncio.Future[bool]
    ) -> None:
        """Give a hold up, after it has been answered: the other way round it would stay."""
        with contextlib.suppress(RequestError):
            await asking
        await keeper.let_go(handle, reader)
