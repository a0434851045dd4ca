"""Who is there: replicas, their birth, their load. A plain class; a Serve deployment hosts it.

Soft state: replicas register again and again (a heartbeat is a registration), an entry that is not
renewed expires, and a directory that restarts is empty for one heartbeat and then whole again. Its
epoch, new with every start, tells replicas that it forgot them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from td_serve.types import Epoch, ReplicaId, ReplicaState


@dataclass(frozen=True)
class _Entry:
    state: ReplicaState
    expires_at: float


class KVDirectory:
    """Replicas by id. `ttl_s` is how long an entry lives without renewal; `clock` in seconds."""

    def __init__(self, ttl_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = Epoch(time.time_ns())
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[ReplicaId, _Entry] = {}

    def register(self, state: ReplicaState) -> Epoch:
        """Enter or renew a replica. Returns this directory's epoch."""
        self._entries[state.replica] = _Entry(state, self._clock() + self._ttl_s)
        return self.epoch

    def replicas(self) -> list[ReplicaState]:
        """Replicas that are alive, by id. Mutates: forgets the expired ones."""
        now = self._clock()
        self._entries = {
            replica: entry for replica, entry in self._entries.items() if entry.expires_at > now
        }
        return [self._entries[replica].state for replica in sorted(self._entries)]
