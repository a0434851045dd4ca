"""A decode engine's leases: kept where its blocks are, in the scheduler's process.

Two threads meet here. The scheduler's own grants leases, frees what they held and reclaims them
when live requests need room: it alone touches the block pool. The server's answers the engine's
host, over a Unix socket: may this reader read (`hold`), what is there (`counts`). One lock is
between them, so that a lease is never promised to a reader and reclaimed at the same moment.

A leased block has one reference more than its users, like one in use: vLLM frees the finished
request as always, the engine sleeps when idle, and the prefix cache still finds the block.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.request import RequestStatus

from td_serve.errors import Unavailable
from td_serve.leases import LeaseCounts, LeaseTable
from td_serve.types import ConversationKey, LeaseId

log = logging.getLogger(__name__)

LEASE = "td_lease"
"""Key of a request's KV transfer parameters, and of what it finishes with: see `LeaseOrder` and
`Granted`."""

_ANSWER_PATIENCE_S = 5.0
_SERVER_LOOKS_UP_MS = 500
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class LeaseOrder(msgspec.Struct, frozen=True):
    """A request wants its KV kept when it has finished: the blocks from token `first` on."""

    id: LeaseId
    conversation: ConversationKey
    first: int = 0


class Granted(msgspec.Struct, frozen=True):
    """What is kept: the KV of the first `tokens` tokens, in these blocks of `block_size` tokens,
    without the first `skipped` blocks.

    `number` leases had been granted before.
    """

    id: LeaseId
    number: int
    tokens: int
    block_size: int
    block_ids: list[int]
    ttl_s: float
    skipped: int = 0


class LeaseKeeper:
    """The leases of one engine; made in its scheduler's process. `address` is a ZeroMQ one."""

    def __init__(self, ttl_s: float, address: str) -> None:
        self._table = LeaseTable(ttl_s)
        self._lock = threading.Lock()
        self._pool: Any = None
        self._block_size = 0
        self._short = False
        self._granted = 0
        self._server = _Server(address, self._answer)

    def bind(self, kv_cache_manager: Any) -> None:
        """Take the engine's block pool. Leases are granted only where one KV group holds it all."""
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        if len(groups) == 1:
            self._pool = kv_cache_manager.block_pool
            self._block_size = groups[0].kv_cache_spec.block_size
            self._table.most_held = self._pool.num_gpu_blocks // 2
        else:
            log.warning("no leases: the model has %d KV groups, expected one", len(groups))

    def close(self) -> None:
        self._server.close()

    def grant(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Keep a finished request's KV, if it wants that and has come to its end.

        Gives what the request's last output carries.
        """
        params = request.kv_transfer_params or {}
        if LEASE not in params or self._pool is None or request.status not in COMPLETE:
            return None
        order = msgspec.convert(params[LEASE], LeaseOrder)
        # The last token sampled was never fed back; one that was scheduled may not have been.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        skipped = order.first // self._block_size
        ids = block_ids[0][skipped : -(-tokens // self._block_size)]
        blocks = [self._pool.blocks[block_id] for block_id in ids]
        if not blocks or any(block.is_null for block in blocks):
            return None
        with self._lock:
            here = tokens - skipped * self._block_size
            if not self._table.grant(order.id, order.conversation, here, blocks):
                return None
        self._pool.touch(blocks)
        self.settle()
        granted = Granted(
            id=order.id,
            number=self._granted,
            tokens=tokens,
            block_size=self._block_size,
            block_ids=ids,
            ttl_s=self._table.ttl_s,
            skipped=skipped,
        )
        self._granted += 1
        return {LEASE: msgspec.to_builtins(granted)}

    def settle(self) -> None:
        """Free the blocks of leases that have ended."""
        with self._lock:
            self._table.expire()
            ended = self._table.take_ended()
        for lease in ended:
            # The end of a prompt is evicted before its beginning.
            self._pool.free_blocks(reversed(lease.blocks))

    @property
    def is_short(self) -> bool:
        """A running request has found no block in this step: what is freed now is its."""
        return self._short

    def end_step(self) -> None:
        """The step has been scheduled."""
        self._short = False
        self.settle()

    def make_room_for(self, request: Any, computed_tokens: int) -> None:
        """Reclaim what a waiting request lacks, others' leases before its own conversation's.

        What the prefix cache has of its prompt counts only if its own lease keeps it: a block that
        nobody uses is taken from the free ones, too.
        """
        if self._pool is None:
            return
        own = self._conversation_of(request)
        wanted = -(-request.num_tokens // self._block_size) + 1
        with self._lock:
            kept = 0 if own is None else self._table.blocks_of(own)
        self._make_room(wanted - min(kept, computed_tokens // self._block_size), spare=own)
        if self._missing(wanted - min(kept, computed_tokens // self._block_size)) > 0:
            self._make_room(wanted)

    def make_some_room(self) -> bool:
        """Reclaim at least one block for a running request that would be preempted otherwise.

        False when there is nothing to reclaim.
        """
        if self._pool is None:
            return False
        self._short = self._make_room(self._pool.get_num_free_blocks() + 1)
        return self._short

    def _make_room(self, blocks: int, spare: ConversationKey | None = None) -> bool:
        """Reclaim leases until the pool has `blocks` free ones. Says whether it ended any."""
        any_ended = False
        while (missing := self._missing(blocks)) > 0:
            with self._lock:
                if not self._table.reclaim(missing, spare):
                    break
            any_ended = True
            self.settle()
        return any_ended

    def _missing(self, blocks: int) -> int:
        return blocks - int(self._pool.get_num_free_blocks())

    @staticmethod
    def _conversation_of(request: Any) -> ConversationKey | None:
        """Whose last turn the request may find in the prefix cache."""
        if LEASE not in (request.kv_transfer_params or {}):
            return None
        order = msgspec.convert(request.kv_transfer_params[LEASE], LeaseOrder)
        return None if order.first else order.conversation

    def _answer(self, ask: list[Any]) -> Any:
        """The host's question, in the server's thread: a method of the table and its arguments."""
        with self._lock:
            match ask:
                case ["hold", lease_id, reader, for_s]:
                    return self._table.hold(lease_id, reader, for_s)
                case ["let_go", lease_id, reader]:
                    return self._table.let_go(lease_id, reader)
                case ["end", lease_id]:
                    return self._table.end(lease_id)
                case ["forget", conversation]:
                    return self._table.forget(conversation)
                case ["counts"]:
                    return self._table.counts()
        raise ValueError(f"unknown question {ask!r}")


class _Server:
    """Answers on a ZeroMQ REP socket, in a thread of its own, until closed."""

    def __init__(self, address: str, answer: Callable[[list[Any]], Any]) -> None:
        self._answer = answer
        self._closing = threading.Event()
        self._socket: Any = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.RCVTIMEO, _SERVER_LOOKS_UP_MS)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(linger=0)  # or the process would wait for it at its end
            raise
        self._thread = threading.Thread(target=self._serve, name="td-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                ask = msgspec.msgpack.decode(self._socket.recv())
            except zmq.Again:
                continue
            try:
                reply = {"ok": self._answer(ask)}
            except Exception as error:
                log.exception("question %r", ask)
                reply = {"error": repr(error)}
            self._socket.send(msgspec.msgpack.encode(reply))
        self._socket.close(linger=0)


class LeaseClient:
    """The host's side: asks the keeper, one question at a time. Use in one event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()
        self._socket: Any = None
        self._turn = asyncio.Lock()

    async def hold(self, lease_id: LeaseId, reader: str, for_s: float) -> bool:
        """Promise a reader the lease's blocks for `for_s` seconds. False: the lease has ended.

        Raises Unavailable when the engine does not answer, like the others.
        """
        return bool(await self._ask("hold", lease_id, reader, for_s))

    async def let_go(self, lease_id: LeaseId, reader: str) -> None:
        """The reader is done."""
        await self._ask("let_go", lease_id, reader)

    async def end(self, lease_id: LeaseId) -> bool:
        """End a lease, or keep it from being granted. False: there was none."""
        return bool(await self._ask("end", lease_id))

    async def forget(self, conversation: ConversationKey) -> bool:
        return bool(await self._ask("forget", conversation))

    async def counts(self) -> LeaseCounts:
        return msgspec.convert(await self._ask("counts"), LeaseCounts)

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _ask(self, *question: Any) -> Any:
        async with self._turn:
            if self._socket is None:
                self._socket = self._context.socket(zmq.REQ)
                self._socket.connect(self._address)
            try:
                async with asyncio.timeout(_ANSWER_PATIENCE_S):
                    await self._socket.send(msgspec.msgpack.encode(question))
                    reply = msgspec.msgpack.decode(await self._socket.recv())
            except BaseException as error:
                # A REQ socket that missed an answer cannot ask again.
                self._socket.close(linger=0)
                self._socket = None
                if isinstance(error, TimeoutError):
                    raise Unavailable("the engine does not answer for its leases") from error
                raise
        if "error" in reply:
            raise Unavailable(f"the engine's leases: {reply['error']}")
        return reply["ok"]
