"""Leases: each ends once, for a reason, and never under a reader."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from td_serve.leases import MOST_REFUSED, End, LeaseTable
from td_serve.types import ConversationKey, LeaseId
from tests.fakes import Clock

TTL = 480.0


class Rig:
    def __init__(self) -> None:
        self.clock = Clock()
        self.table = LeaseTable(TTL, self.clock)

    def grant(self, lease: str, conversation: str = "", tokens: int = 32, blocks: int = 1) -> bool:
        return self.table.grant(
            LeaseId(lease),
            ConversationKey(conversation or lease),
            tokens,
            [object() for _ in range(blocks)],
        )

    def hold(self, lease: str, reader: str = "p", for_s: float = 30.0) -> bool:
        return self.table.hold(LeaseId(lease), reader, for_s)

    def taken(self) -> list[LeaseId]:
        self.table.check_integrity()
        return [lease.id for lease in self.table.take_ended()]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_lease_lasts_its_time_and_a_reader_starts_it_anew(rig: Rig) -> None:
    rig.grant("one")
    rig.grant("two")
    rig.clock.now += TTL - 1
    assert rig.hold("two", for_s=1.0)
    assert rig.table.counts().live == {"one": 1.0, "two": TTL}
    rig.clock.now += 1
    assert rig.table.counts().live == {"two": TTL - 1}
    assert not rig.hold("one")
    assert rig.taken() == ["one"]
    rig.clock.now += TTL
    rig.table.expire()
    assert rig.taken() == ["two"]
    assert rig.table.ends == {End.EXPIRED: 2}


def test_a_lease_that_was_ended_before_it_was_granted_is_not_granted(rig: Rig) -> None:
    """Who has left is quicker than the step that ends the turn; the turn before stays readable."""
    rig.grant("before", conversation="c")
    assert not rig.table.end(LeaseId("left"))
    assert not rig.table.grant(LeaseId("left"), ConversationKey("c"), 32, [0])
    assert rig.table.counts().live.keys() == {"before"}
    assert rig.taken() == []
    assert rig.table.ends == {}


def test_of_leases_that_never_come_not_more_than_some_are_remembered(rig: Rig) -> None:
    for number in range(MOST_REFUSED + 1):
        rig.table.end(LeaseId(str(number)))
    assert rig.table.grant(LeaseId("0"), ConversationKey("c"), 32, [0]), "forgotten by then"
    assert not rig.table.grant(LeaseId("1"), ConversationKey("d"), 32, [0])


def test_a_longer_lease_does_not_shield_one_that_is_over(rig: Rig) -> None:
    rig.grant("first")
    rig.clock.now += 1
    rig.grant("second")
    rig.clock.now += 1
    rig.hold("first", for_s=0.0)  # renewed: it now ends after the second
    rig.clock.now += TTL - 1.5
    rig.grant("third")
    rig.clock.now += 1
    rig.table.expire()
    assert rig.table.counts().live.keys() == {"third", "first"}
    assert rig.taken() == ["second"]


def test_a_newer_turn_supersedes_the_older(rig: Rig) -> None:
    rig.grant("one", "c")
    rig.grant("two", "c")
    assert rig.taken() == ["one"]
    assert rig.table.forget(ConversationKey("c"))
    assert not rig.table.forget(ConversationKey("c"))
    assert rig.taken() == ["two"]
    assert rig.table.ends == {End.SUPERSEDED: 1, End.DELETED: 1}


def test_blocks_stay_under_a_reader_until_it_lets_go(rig: Rig) -> None:
    rig.grant("one", "c", blocks=4)
    assert rig.hold("one", "p1")
    assert rig.hold("one", "p2")
    rig.grant("two", "c", blocks=5)
    assert rig.taken() == []
    assert rig.table.blocks == 9
    rig.table.let_go(LeaseId("one"), "p1")
    assert (rig.taken(), rig.table.unfreed) == ([], 0)
    rig.table.let_go(LeaseId("one"), "p2")
    assert rig.table.unfreed == 4
    assert rig.taken() == ["one"]
    assert rig.table.blocks == 5
    rig.table.let_go(LeaseId("one"), "p2")


def test_a_reader_that_died_holds_for_its_time_and_no_longer(rig: Rig) -> None:
    rig.grant("one", "c")
    rig.hold("one", for_s=30.0)
    rig.table.end(LeaseId("one"))
    rig.clock.now += 29
    assert rig.taken() == []
    rig.clock.now += 1
    assert rig.taken() == ["one"]


def test_room_is_made_by_the_cheapest_and_never_from_under_a_reader(rig: Rig) -> None:
    for lease, tokens in (("dear", 900), ("cheap", 100), ("held", 50), ("middling", 500)):
        rig.grant(lease, tokens=tokens, blocks=tokens // 50)
    rig.hold("held")
    assert rig.table.reclaim(3) == 2 + 10
    assert rig.taken() == ["cheap", "middling"]
    assert rig.table.reclaim(100) == 18
    assert rig.table.reclaim(1) == 0
    assert rig.table.counts().live.keys() == {"held"}
    assert rig.table.ends == {End.RECLAIMED: 3}


def test_an_id_is_used_once(rig: Rig) -> None:
    rig.grant("one")
    with pytest.raises(ValueError, match="lease_id: 'one' is in use"):
        rig.grant("one", "other")


class Leases(RuleBasedStateMachine):
    """Whatever happens: blocks are given back once, and not before their readers' time."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.ordered = 0
        self.granted: dict[str, int] = {}
        self.ended: set[str] = set()
        self.taken: set[str] = set()
        self.held: dict[tuple[str, str], float] = {}

    @rule(conversation=st.sampled_from("abc"), blocks=st.integers(1, 9))
    def grant(self, conversation: str, blocks: int) -> None:
        lease = f"lease-{self.ordered}"
        self.ordered += 1
        if self.rig.grant(lease, conversation, tokens=blocks * 32, blocks=blocks):
            assert lease not in self.ended
            self.granted[lease] = blocks
        else:
            assert lease in self.ended, "nobody has ended it before"

    @rule(number=st.integers(0, 20), reader=st.sampled_from("pq"), for_s=st.floats(0, 60))
    def hold(self, number: int, reader: str, for_s: float) -> None:
        lease = f"lease-{number}"
        if self.rig.hold(lease, reader, for_s):
            assert lease not in self.taken
            self.held[lease, reader] = self.rig.clock.now + for_s

    @rule(number=st.integers(0, 20), reader=st.sampled_from("pq"))
    def let_go(self, number: int, reader: str) -> None:
        self.rig.table.let_go(LeaseId(f"lease-{number}"), reader)
        self.held.pop((f"lease-{number}", reader), None)

    @rule(number=st.integers(0, 20))
    def end(self, number: int) -> None:
        self.rig.table.end(LeaseId(f"lease-{number}"))
        self.ended.add(f"lease-{number}")

    @rule(blocks=st.integers(1, 30))
    def reclaim(self, blocks: int) -> None:
        self.rig.table.reclaim(blocks)

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, TTL]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.table.expire()

    @rule()
    def take(self) -> None:
        now = self.rig.clock.now
        for lease in self.rig.table.take_ended():
            assert lease.id not in self.taken, "given back twice"
            assert lease.id in self.granted
            self.taken.add(lease.id)
            assert all(
                until <= now for (held, _), until in self.held.items() if held == lease.id
            ), "taken from under a reader"

    @invariant()
    def nothing_is_lost(self) -> None:
        self.rig.table.check_integrity()
        kept = sum(blocks for lease, blocks in self.granted.items() if lease not in self.taken)
        assert self.rig.table.blocks == kept


def test_readers_never_hold_more_than_their_share() -> None:
    """What is held cannot be reclaimed, and what it waits for may itself wait for room here."""
    rig = Rig()
    rig.table.most_held = 10
    for lease, blocks in (("one", 6), ("two", 5), ("three", 4)):
        rig.grant(lease, blocks=blocks)
    assert rig.hold("one", "p1")
    assert rig.hold("one", "p2"), "it is held anyway"
    assert not rig.hold("two")
    assert rig.hold("three")
    rig.table.let_go(LeaseId("one"), "p1")
    assert not rig.hold("two")
    rig.table.let_go(LeaseId("one"), "p2")
    assert rig.hold("two")


def test_what_is_more_than_a_share_is_held_alone() -> None:
    """A long conversation: or it would be kept, and never read."""
    rig = Rig()
    rig.table.most_held = 10
    for lease, blocks in (("long", 15), ("short", 1)):
        rig.grant(lease, blocks=blocks)
    assert rig.hold("short")
    assert not rig.hold("long")
    rig.table.let_go(LeaseId("short"), "p")
    assert rig.hold("long")
    assert not rig.hold("short")


def test_a_block_that_two_leases_keep_counts_once() -> None:
    """Conversations that begin alike share blocks, and none of them is anybody's second share."""
    rig = Rig()
    rig.table.most_held = 10
    shared, others = [object() for _ in range(7)], [object() for _ in range(4)]
    for lease, own in (("one", others[:1]), ("two", others[1:3]), ("three", others[3:])):
        rig.table.grant(LeaseId(lease), ConversationKey(lease), 320, [*shared, *own])
    assert rig.table.blocks == 11
    assert rig.hold("one")
    assert rig.hold("two")
    assert not rig.hold("three")
    assert rig.table.counts().held == 10
    for lease in ("two", "three"):
        rig.table.end(LeaseId(lease))
    assert rig.table.unfreed == 8
    assert rig.table.counts().blocks == 11, "one and two are held, three has not been taken"
    assert rig.taken() == ["three"]
    assert rig.table.blocks == 10


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
