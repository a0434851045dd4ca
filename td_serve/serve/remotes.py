"""The directory, and decode replicas as keepers of KV, reached over Ray Serve handles."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

from td_serve.serve.calls import ask, ask_all
from td_serve.serve.routing import towards
from td_serve.types import ConversationKey, Epoch, Handle, ReplicaState, RequestId, pack, unpack


class RemoteDirectory:
    """`KVDirectory` behind its handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def register(self, state: ReplicaState) -> Epoch:
        return Epoch(await ask(self._handle.register, pack(state)))

    async def keep(self, handle: Handle) -> None:
        await ask(self._handle.keep, pack(handle))

    async def drop(self, handles: list[Handle]) -> None:
        await ask(self._handle.drop, [(one.conversation, one.lease) for one in handles])

    async def replicas(self) -> list[ReplicaState]:
        return [unpack(one, ReplicaState) for one in await ask(self._handle.replicas)]


class RemoteKeeper:
    """The decode replicas, each asked for what it keeps (`handles.Keeper`)."""

    def __init__(self, decode: DeploymentHandle) -> None:
        self._decode = decode

    async def hold(self, handle: Handle, reader: RequestId, for_s: float) -> bool:
        replica = towards(self._decode, handle.replica)
        return bool(await ask(replica.hold, pack(handle), reader, for_s))

    async def let_go(self, handle: Handle, reader: RequestId) -> None:
        await ask(towards(self._decode, handle.replica).let_go, pack(handle), reader)

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept for a conversation, wherever it is. Says whether anything was."""
        return any(await ask_all(self._decode, "forget", conversation))
