"""Leases: a decode engine's promise to keep a finished turn's blocks for the next one. Pure.

Life of a lease: `grant` → any number of `hold` and `let_go` → ended, once, for one `End`. Whoever
owns the blocks takes the ended leases with `take_ended` and frees them; until then they count as
leased. A **hold** is the promise to one reader: for that long, or until it lets go, the blocks stay
what they are, even if the lease ends, so that a reader who is done within its hold (by its own
clock, begun before it asked) has read what the lease stood for. To be read is to be in use: a hold
renews the lease.

Times are seconds on the table's own clock; only durations leave it.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from td_serve.types import ConversationKey, LeaseId

MOST_REFUSED = 4096
"""How many leases that were ended and not known are remembered: more than a step can grant."""


class End(enum.Enum):
    """Why a lease ended."""

    EXPIRED = "expired"
    """Nobody used it in time."""
    SUPERSEDED = "superseded"
    """A newer turn of the same conversation has a lease."""
    DELETED = "deleted"
    """Its conversation was deleted, or its owner gave it up."""
    RECLAIMED = "reclaimed"
    """Live requests needed its blocks."""


class Lease(msgspec.Struct, kw_only=True):
    """Blocks kept for a conversation. `blocks` is the pool's own business; of leases that begin
    alike some are the same objects."""

    id: LeaseId
    conversation: ConversationKey
    tokens: int
    blocks: list[Any]
    expires_at: float
    holds: dict[str, float] = {}
    """Readers, and until when each may read."""

    def is_held(self, now: float) -> bool:
        return any(until > now for until in self.holds.values())


class LeaseCounts(msgspec.Struct, frozen=True):
    """The live leases with their remaining seconds, the blocks kept, and why others ended.

    A block that several leases keep counts once. Of the blocks, `held` are being read, and
    `unfreed` those of leases that have ended and nobody has taken.
    """

    live: dict[LeaseId, float]
    blocks: int
    held: int
    unfreed: int
    ends: dict[End, int]


class LeaseTable:
    """All leases of one engine. Not thread-safe: its owner serialises the calls.

    `ttl_s` is how long a lease lasts from its grant or last hold on. At most `most_held` blocks are
    held at a time, or one lease of whatever size: readers wait for prefill's pool, which waits for
    this one, and many of them must never have all of it. One has it until its time is over.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        most_held: int | None = None,
    ) -> None:
        self.ttl_s = ttl_s
        self.most_held = most_held
        self._clock = clock
        self._live: dict[LeaseId, Lease] = {}
        self._newest: dict[ConversationKey, LeaseId] = {}
        self._ending: dict[LeaseId, Lease] = {}
        self._ended: list[Lease] = []
        self._refused: OrderedDict[LeaseId, None] = OrderedDict()
        self.ends: Counter[End] = Counter()

    @property
    def live(self) -> int:
        """Leases that a reader may still ask for."""
        return len(self._live)

    @property
    def blocks(self) -> int:
        """Blocks kept, those of ended leases that nobody has taken included."""
        return _distinct([*self._live.values(), *self._ending.values(), *self._ended])

    @property
    def unfreed(self) -> int:
        """Blocks that `take_ended` would give."""
        now = self._clock()
        over = [one for one in self._ending.values() if not one.is_held(now)]
        return _distinct([*over, *self._ended])

    def grant(
        self, lease_id: LeaseId, conversation: ConversationKey, tokens: int, blocks: list[Any]
    ) -> bool:
        """Keep `blocks`; the conversation's lease before this one ends.

        False: it has been ended before it was granted, and nothing changes. Raises ValueError when
        the id is in use.
        """
        if lease_id in self._refused:
            del self._refused[lease_id]
            return False
        if lease_id in self._live or lease_id in self._ending:
            raise ValueError(f"lease_id: {lease_id!r} is in use, expected a new one")
        if (before := self._newest.get(conversation)) is not None:
            self._end(before, End.SUPERSEDED)
        self._live[lease_id] = Lease(
            id=lease_id,
            conversation=conversation,
            tokens=tokens,
            blocks=blocks,
            expires_at=self._clock() + self.ttl_s,
        )
        self._newest[conversation] = lease_id
        return True

    def hold(self, lease_id: LeaseId, reader: str, for_s: float) -> bool:
        """Promise `reader` the blocks for `for_s` seconds, and renew.

        False: it has ended, or too much is held already.
        """
        self.expire()
        lease = self._live.get(lease_id)
        if lease is None:
            return False
        now = self._clock()
        if self.most_held is not None and not lease.is_held(now):
            held = [one for one in self._kept if one.is_held(now)]
            if held and _distinct([*held, lease]) > self.most_held:
                return False
        lease.expires_at = now + self.ttl_s
        lease.holds = {one: until for one, until in lease.holds.items() if until > now}
        lease.holds[reader] = now + for_s
        return True

    def let_go(self, lease_id: LeaseId, reader: str) -> None:
        """The reader is done. Letting go twice, or of a lease that is gone, changes nothing."""
        lease = self._live.get(lease_id) or self._ending.get(lease_id)
        if lease is not None:
            lease.holds.pop(reader, None)

    def end(self, lease_id: LeaseId) -> bool:
        """End a lease (`End.DELETED`). False: it has ended already, or is not granted.

        One that is granted later all the same is refused: who has left may be quicker than the
        engine's step that ends the turn.
        """
        if lease_id not in self._live:
            self._refused[lease_id] = None
            while len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)
            return False
        self._end(lease_id, End.DELETED)
        return True

    def forget(self, conversation: ConversationKey) -> bool:
        """End a conversation's lease. False: it has none."""
        lease_id = self._newest.get(conversation)
        return lease_id is not None and self.end(lease_id)

    def expire(self) -> None:
        """End what nobody used in time."""
        now = self._clock()
        # All of them, whatever their order: one that lasts longer must not shield the others.
        for lease_id in [one.id for one in self._live.values() if one.expires_at <= now]:
            self._end(lease_id, End.EXPIRED)

    def blocks_of(self, conversation: ConversationKey) -> int:
        """How many blocks are kept for a conversation."""
        lease_id = self._newest.get(conversation)
        return 0 if lease_id is None else len(self._live[lease_id].blocks)

    def reclaim(self, blocks: int, spare: ConversationKey | None = None) -> int:
        """End leases until `blocks` blocks are named for freeing, the cheapest to recompute first.

        Held ones are left alone, and that of the conversation `spare`. Gives how many blocks those
        that ended name; some of them may have other users and not become free.
        """
        now = self._clock()
        named = 0
        for lease in sorted(self._live.values(), key=lambda one: (one.tokens, one.expires_at)):
            if named >= blocks:
                break
            if not lease.is_held(now) and lease.conversation != spare:
                self._end(lease.id, End.RECLAIMED)
                named += len(lease.blocks)
        return named

    def take_ended(self) -> list[Lease]:
        """The leases that have ended and are held by no reader; their blocks are now the caller's
        to free."""
        now = self._clock()
        over = [lease_id for lease_id, one in self._ending.items() if not one.is_held(now)]
        ended = self._ended + [self._ending.pop(lease_id) for lease_id in over]
        self._ended = []
        return ended

    def counts(self) -> LeaseCounts:
        """Where this table stands."""
        self.expire()
        now = self._clock()
        return LeaseCounts(
            live={lease.id: lease.expires_at - now for lease in self._live.values()},
            blocks=self.blocks,
            held=_distinct([one for one in self._kept if one.is_held(now)]),
            unfreed=self.unfreed,
            ends=dict(self.ends),
        )

    def check_integrity(self) -> None:
        """Each live lease is some conversation's newest. Raises AssertionError."""
        assert set(self._newest.values()) == set(self._live), "a lease that nobody can find"
        for conversation, lease_id in self._newest.items():
            assert self._live[lease_id].conversation == conversation, "another's lease"
        assert not self._live.keys() & self._ending.keys(), "a lease that has ended and lives"

    @property
    def _kept(self) -> list[Lease]:
        """The leases that readers may have been promised."""
        return [*self._live.values(), *self._ending.values()]

    def _end(self, lease_id: LeaseId, why: End) -> None:
        lease = self._live.pop(lease_id)
        if self._newest.get(lease.conversation) == lease_id:
            del self._newest[lease.conversation]
        self.ends[why] += 1
        if lease.is_held(self._clock()):
            self._ending[lease_id] = lease  # its blocks stay where a reader reads them
        else:
            self._ended.append(lease)


def _distinct(leases: list[Lease]) -> int:
    """How many blocks these leases keep."""
    return len({id(block) for lease in leases for block in lease.blocks})
