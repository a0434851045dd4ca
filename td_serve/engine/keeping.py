"""A decode engine's host, when it keeps turns: ordering leases, and answering for them.

`leasing` is the other half, in the engine's scheduler.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from td_serve.engine.leasing import LEASE, Granted, LeaseClient, LeaseOrder
from td_serve.handles import digests, same
from td_serve.leases import LeaseCounts
from td_serve.tasks import Tasks
from td_serve.transfer.ports import PortLease
from td_serve.types import (
    ConversationKey,
    Epoch,
    GenerateRequest,
    Handle,
    LeaseId,
    ReaderId,
    ReplicaId,
)

_MOST_FORGOTTEN = 4096
"""How many deleted conversations are remembered, for turns of theirs that are on their way."""


class LeaseSocket:
    """Where an engine and its host meet about leases; no other user can open it."""

    def __init__(self, port: PortLease) -> None:
        self._path = port.folder / f"{port.first}.leases"
        self.address = f"ipc://{self._path}"

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's blocks are read: what its handles have in common (see `types.Handle`)."""

    replica: ReplicaId
    epoch: Epoch
    host: str
    port: int
    tp_size: int


class Keeping:
    """The turns that one decode engine keeps. `wake` has the engine take a step."""

    def __init__(
        self,
        socket: LeaseSocket,
        place: Place,
        wake: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = LeaseClient(socket.address)
        self._socket = socket
        self._place = place
        self._wake = wake
        self._clock = clock
        self._tasks = Tasks()
        self._kept: dict[ConversationKey, Handle] = {}
        """As granted; some may have ended since `counts` was last asked."""
        self._ordered: dict[ConversationKey, set[LeaseId]] = {}
        """What turns under way have ordered."""
        self._forgotten: OrderedDict[ConversationKey, float] = OrderedDict()
        """When conversations were deleted."""

    @property
    def turns(self) -> int:
        """How many turns are kept."""
        return len(self._kept)

    def order(self, request: GenerateRequest) -> dict[str, Any]:
        """The KV transfer parameters that have a turn kept; empty where it shall not be.

        For those who read what it puts out the blocks are kept that hold it.
        """
        if request.conversation is None or request.n > 1:
            return {}
        began = self._clock() - request.age_s
        if self._forgotten.get(request.conversation, -math.inf) > began:
            return {}
        order = LeaseOrder(
            id=LeaseId(uuid.uuid4().hex),
            conversation=request.conversation,
            first=_first(request),
        )
        self._ordered.setdefault(order.conversation, set()).add(order.id)
        return {LEASE: msgspec.to_builtins(order)}

    def handle(
        self,
        request: GenerateRequest,
        generated: list[int],
        kv: Mapping[str, Any] | None,
        prefilled_by: ReplicaId | None,
    ) -> Handle | None:
        """The handle of a finished turn, if its KV is kept; `kv` is what it finished with.

        Of two turns that end at once the earlier is superseded already: it has none.
        """
        if request.conversation is None or kv is None or LEASE not in kv:
            return None
        granted = msgspec.convert(kv[LEASE], Granted)
        self._is_over(request.conversation, granted.id)
        tokens = [*request.prompt_token_ids, *generated][: granted.tokens]
        whole = len(tokens) // granted.block_size * granted.block_size
        salted = granted.block_size, request.cache_salt
        handle = Handle(
            **msgspec.structs.asdict(self._place),
            lease=granted.id,
            conversation=request.conversation,
            block_size=granted.block_size,
            block_ids=[granted.block_ids],
            tokens=len(tokens),
            # Without its beginning it is no prompt's.
            digests=b"" if granted.skipped else digests(tokens, *salted),
            tail=[] if granted.skipped else tokens[whole:],
            skipped=granted.skipped,
            remaining_s=granted.ttl_s,
            number=granted.number,
            prefilled_by=prefilled_by,
        )
        known = self._kept.get(request.conversation)
        if known is not None and known.number > handle.number:
            return None
        self._kept[request.conversation] = handle
        return handle

    def cancel(self, order: Mapping[str, Any]) -> None:
        """Nobody has learnt of the lease that a turn ordered: there shall be none."""
        if order:
            ordered = msgspec.convert(order[LEASE], LeaseOrder)
            self._is_over(ordered.conversation, ordered.id)
            self._tasks.run(self.end(ordered.id))

    def _is_over(self, conversation: ConversationKey, lease: LeaseId) -> None:
        """The turn that has ordered this lease is not under way any more."""
        ordered = self._ordered.get(conversation, set())
        ordered.discard(lease)
        if not ordered:
            self._ordered.pop(conversation, None)

    async def end(self, lease: LeaseId) -> None:
        """End a lease, if it has not ended yet. Raises Unavailable."""
        if await self._client.end(lease):
            await self._wake()

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        """See `handles.Keeper`. What is not exactly as it was granted is not kept."""
        ours = self._kept.get(handle.conversation)
        if ours is None or not same(handle, ours):
            return False
        return await self._client.hold(handle.lease, reader, for_s)

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        """See `handles.Keeper`."""
        await self._client.let_go(handle.lease, reader)

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept for a conversation, and keep nothing of its turns under way, those
        that are still being prefilled elsewhere included.

        Says whether there was anything. Raises Unavailable.
        """
        self._forgotten[conversation] = self._clock()
        self._forgotten.move_to_end(conversation)
        if len(self._forgotten) > _MOST_FORGOTTEN:
            self._forgotten.popitem(last=False)
        ordered = list(self._ordered.get(conversation, ()))
        for lease in ordered:
            await self.end(lease)  # refused, where it has not been granted yet
        forgotten = await self._client.forget(conversation)
        if forgotten:
            await self._wake()
        return forgotten or bool(ordered)

    async def counts(self) -> LeaseCounts:
        """The leases right now; also has the engine free what has ended. Raises Unavailable."""
        before = list(self._kept.values())
        counts = await self._client.counts()
        for handle in before:
            # One that was granted while we asked is not among the live ones yet.
            if handle.lease not in counts.live and self._kept.get(handle.conversation) is handle:
                del self._kept[handle.conversation]
        if counts.unfreed:
            await self._wake()
        return counts

    def close(self) -> None:
        self._client.close()
        self._socket.close()


def _first(request: GenerateRequest) -> int:
    """From which token on a turn is kept."""
    is_read_for_what_it_says = request.conversation == request.writes
    return len(request.prompt_token_ids) if is_read_for_what_it_says else 0
