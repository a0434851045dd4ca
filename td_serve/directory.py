"""Who is there, and whose KV is where. A plain class; a Serve deployment hosts it.

Soft state: replicas register again and again (a heartbeat is a registration), an entry that is not
renewed expires, and a directory that restarts is empty for one heartbeat and then whole again. Its
epoch, new with every start, tells replicas that it forgot them, and what they keep.

It stores places, never tensors. A handle that it gives may have ended in the meantime: only the
engine that keeps the blocks knows, and is asked before anybody reads.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from td_serve.conversations import tenant_of
from td_serve.types import (
    ConversationKey,
    Epoch,
    Handle,
    LeaseId,
    Registered,
    ReplicaId,
    ReplicaState,
)


@dataclass(frozen=True)
class _Entry:
    state: ReplicaState
    expires_at: float


@dataclass
class _Kept:
    handle: Handle
    ends_at: float
    """As its replica told it. Not moved by being found: that alone makes no turn newer."""
    expires_at: float
    """When it is forgotten here; moved on whenever it is found."""


class KVDirectory:
    """Replicas by id, handles by conversation.

    `ttl_s` is how long a replica's entry lives without renewal. Of `handles_kept` handles at most
    the least recently used goes first, of the tenant that has most: nobody's conversations push
    another tenant's out while his own are more. `clock` is in seconds.
    """

    def __init__(
        self,
        ttl_s: float = 10.0,
        handles_kept: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = Epoch(time.time_ns())
        self._ttl_s = ttl_s
        self._handles_kept = handles_kept
        self._clock = clock
        self._entries: dict[ReplicaId, _Entry] = {}
        self._tenants: dict[str, OrderedDict[ConversationKey, _Kept]] = {}
        self._handles = 0
        self._superseded: dict[ReplicaId, dict[LeaseId, float]] = {}
        """Leases of no use any more, and when each ends by itself."""

    def register(self, state: ReplicaState) -> Registered:
        """Enter or renew a replica; says which of its leases are useless, until it drops them."""
        now = self._clock()
        self._entries[state.replica] = _Entry(state, now + self._ttl_s)
        self._prune(now)
        superseded = list(self._superseded.get(state.replica, ()))
        return Registered(epoch=self.epoch, superseded=superseded)

    def replicas(self) -> list[ReplicaState]:
        """Replicas that are alive, by id. Mutates: forgets the expired ones."""
        now = self._clock()
        self._entries = {
            replica: entry for replica, entry in self._entries.items() if entry.expires_at > now
        }
        return [self._entries[replica].state for replica in sorted(self._entries)]

    def keep(self, handle: Handle) -> None:
        """Enter a conversation's handle, unless a newer one is known.

        Of one engine's the later granted is the newer. After a restart two replicas may each tell
        of a turn: the one used last is the newer.
        """
        tenant = self._tenants.setdefault(tenant_of(handle.conversation), OrderedDict())
        ends_at = self._clock() + handle.remaining_s
        new = _Kept(handle, ends_at, ends_at)
        known = tenant.get(handle.conversation)
        if known is not None and _is_older(handle, known.handle):
            return
        if known is not None and known.handle.replica != handle.replica:
            old = min(known, new, key=lambda one: one.ends_at)
            useless = self._superseded.setdefault(old.handle.replica, {})
            useless[old.handle.lease] = old.ends_at
            if old is new:
                return
        self._handles += known is None
        tenant[handle.conversation] = new
        tenant.move_to_end(handle.conversation)
        while self._handles > self._handles_kept:
            largest = max(self._tenants.values(), key=len)
            self._drop(next(iter(largest)))

    def find(self, conversation: ConversationKey) -> Handle | None:
        """A conversation's handle, to be asked for at its engine, which starts its time anew."""
        tenant = self._tenants.get(tenant_of(conversation), OrderedDict())
        kept = tenant.get(conversation)
        if kept is None:
            return None
        now = self._clock()
        if kept.expires_at <= now:
            self._drop(conversation)
            return None
        left = kept.expires_at - now
        kept.expires_at = now + kept.handle.remaining_s
        tenant.move_to_end(conversation)
        return msgspec.structs.replace(kept.handle, remaining_s=left)

    def drop(self, leases: Iterable[tuple[ConversationKey, LeaseId]]) -> None:
        """Forget handles of leases that have ended, unless there is a newer one."""
        for conversation, lease in leases:
            kept = self._tenants.get(tenant_of(conversation), OrderedDict()).get(conversation)
            if kept is not None and kept.handle.lease == lease:
                self._drop(conversation)
            for useless in self._superseded.values():
                useless.pop(lease, None)

    def check_integrity(self) -> None:
        """The count of handles is right, and no empty tenant stays. Raises AssertionError."""
        assert self._handles == sum(map(len, self._tenants.values())), "a miscounted handle"
        assert all(self._tenants.values()), "a tenant without handles"

    def _prune(self, now: float) -> None:
        """Forget superseded leases that have ended by themselves, whoever had them."""
        for replica, leases in list(self._superseded.items()):
            left = {lease: ends_at for lease, ends_at in leases.items() if ends_at > now}
            if left:
                self._superseded[replica] = left
            else:
                del self._superseded[replica]

    def _drop(self, conversation: ConversationKey) -> None:
        tenant = self._tenants[tenant_of(conversation)]
        del tenant[conversation]
        self._handles -= 1
        if not tenant:
            del self._tenants[tenant_of(conversation)]


def _is_older(one: Handle, other: Handle) -> bool:
    """Whether the same engine has granted `other` after `one`."""
    same_engine = (one.replica, one.epoch) == (other.replica, other.epoch)
    return same_engine and one.number < other.number
