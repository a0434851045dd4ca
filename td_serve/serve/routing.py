"""Calls that want one replica: where a conversation's KV is, or where it was prefilled last.

A call names the replica in its session id (`handle.options(session_id=...)`), by the engine's id.
It goes there if that replica is there and has room, else to the less busy of two others, like every
call that names none.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from td_serve.types import ReplicaId


def replica_name(role: str, unique_id: str) -> str:
    """How an engine's id begins that a Serve replica hosts."""
    return f"{role}-{unique_id}"


def hosts(unique_id: str, replica: str) -> bool:
    """Whether the Serve replica `unique_id` hosts the engine `replica`."""
    return unique_id in replica.split("-")


class AffinityRouter(ConsistentHashRouter):
    """Takes from its base how calls are matched to routing tasks, and nothing of the ring."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        wanted: str | None = pending_request and pending_request.metadata.session_id
        named = [
            one for one in candidate_replicas if wanted and hosts(one.replica_id.unique_id, wanted)
        ]
        others = [one for one in candidate_replicas if one not in named]
        ranks = [named, random.sample(others, min(2, len(others)))]
        return [rank for rank in ranks if rank]


def towards(handle: Any, replica: ReplicaId | None) -> Any:
    """The handle, its calls wanting `replica`."""
    return handle if replica is None else handle.options(session_id=replica)
