"""The directory, and decode replicas as keepers of KV, reached over Ray Serve handles."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from td_serve.errors import Unavailable
from td_serve.serve.calls import ask, ask_all
from td_serve.serve.routing import towards
from td_serve.types import ConversationKey, Handle, ReaderId, Registered, ReplicaState, pack, unpack

T = TypeVar("T")
_PATIENCE_S = 2.0
"""How long a request waits for what it can do without: Ray itself would wait for a replica for
ever."""


async def _soon(call: Coroutine[Any, Any, T]) -> T:
    """The answer, if it comes soon. Raises Unavailable."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await call
    except TimeoutError:
        raise Unavailable(f"no answer within {_PATIENCE_S:.0f} s") from None


class RemoteDirectory:
    """`KVDirectory` behind its handle. Raises Unavailable where it does not answer soon."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def register(self, state: ReplicaState) -> Registered:
        return unpack(await _soon(ask(self._handle.register, pack(state))), Registered)

    async def keep(self, handle: Handle) -> None:
        await _soon(ask(self._handle.keep, pack(handle)))

    async def find(self, conversation: ConversationKey) -> Handle | None:
        found = await _soon(ask(self._handle.find, conversation))
        return None if found is None else unpack(found, Handle)

    async def drop(self, handles: list[Handle]) -> None:
        ended = [(one.conversation, one.lease) for one in handles]
        await _soon(ask(self._handle.drop, ended))

    async def replicas(self) -> list[ReplicaState]:
        return [unpack(one, ReplicaState) for one in await ask(self._handle.replicas)]


class RemoteKeeper:
    """The decode replicas, each asked for what it keeps (`handles.Keeper`)."""

    def __init__(self, decode: DeploymentHandle) -> None:
        self._decode = decode

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        replica = towards(self._decode, handle.replica)
        return bool(await _soon(ask(replica.hold, pack(handle), reader, for_s)))

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        await _soon(ask(towards(self._decode, handle.replica).let_go, pack(handle), reader))

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept for a conversation, wherever it is. Says whether anything was.

        Raises Unavailable where a replica could not be asked: it may still keep something.
        """
        return any(await ask_all(self._decode, "forget", conversation))
