"""The directory: who renews stays, who does not is gone, and a new one says that it is new."""

import msgspec

from td_serve.conversations import key
from td_serve.directory import KVDirectory
from td_serve.types import Epoch, Handle, LeaseId, ReplicaId, ReplicaState
from tests.fakes import Clock
from tests.test_handles import make_handle


def state(name: str, running: int = 0) -> ReplicaState:
    return ReplicaState(
        replica=ReplicaId(name),
        role="prefill",
        epoch=Epoch(1),
        host="127.0.0.1",
        nixl_port=20500,
        transports=["tcp"],
        running=running,
    )


def test_replicas_are_listed_by_id_with_their_last_word() -> None:
    directory = KVDirectory(clock=Clock())
    for one in (state("b"), state("a"), state("b", running=3)):
        directory.register(one)
    assert directory.replicas() == [state("a"), state("b", running=3)]


def test_an_entry_lives_for_its_time_and_renewal_starts_it_anew() -> None:
    clock = Clock()
    directory = KVDirectory(ttl_s=10.0, clock=clock)
    directory.register(state("a"))
    directory.register(state("b"))
    clock.now += 9.0
    directory.register(state("b"))
    assert len(directory.replicas()) == 2
    clock.now += 1.0
    assert directory.replicas() == [state("b")]
    clock.now += 9.0
    assert directory.replicas() == []
    directory.register(state("a"))
    assert directory.replicas() == [state("a")]


def test_every_registration_answers_with_the_directorys_birth() -> None:
    first, second = KVDirectory(clock=Clock()), KVDirectory(clock=Clock())
    assert first.register(state("a")).epoch == first.register(state("b")).epoch == first.epoch
    assert second.register(state("a")).epoch != first.epoch


def handle_of(tenant: str, conversation: str, lease: str = "one") -> Handle:
    return msgspec.structs.replace(
        make_handle([1, 2, 3]), conversation=key(tenant, conversation), lease=LeaseId(lease)
    )


def test_the_newest_handle_of_a_conversation_is_found_as_long_as_it_is_used() -> None:
    clock = Clock()
    directory = KVDirectory(clock=clock)
    directory.keep(handle_of("t", "c"))
    newest = handle_of("t", "c", "two")
    directory.keep(newest)
    clock.now += 400.0
    assert directory.find(newest.conversation) == msgspec.structs.replace(newest, remaining_s=80.0)
    clock.now += 400.0
    assert directory.find(newest.conversation) is not None, "finding it started its time anew"
    clock.now += 480.0
    assert directory.find(newest.conversation) is None
    directory.check_integrity()


def test_a_lease_that_has_ended_takes_only_its_own_handle_along() -> None:
    directory = KVDirectory(clock=Clock())
    kept = handle_of("t", "c", "two")
    directory.keep(kept)
    directory.drop([(kept.conversation, LeaseId("one")), (key("t", "other"), LeaseId("one"))])
    assert directory.find(kept.conversation) == kept
    directory.drop([(kept.conversation, LeaseId("two"))])
    assert directory.find(kept.conversation) is None
    directory.check_integrity()


def kept_by(replica: str, lease: str, remaining_s: float = 480.0) -> Handle:
    return msgspec.structs.replace(
        handle_of("t", "c", lease), replica=ReplicaId(replica), remaining_s=remaining_s
    )


def test_a_conversation_that_moves_leaves_a_lease_that_its_replica_is_told_of() -> None:
    """As often as it asks, until it has dropped it: an answer may be lost."""
    directory = KVDirectory(clock=Clock())
    directory.keep(kept_by("d1", "one"))
    directory.keep(kept_by("d2", "two"))
    assert directory.register(state("d2")).superseded == []
    for _ in range(2):
        assert directory.register(state("d1")).superseded == ["one"]
    directory.drop([(key("t", "c"), LeaseId("one"))])
    assert directory.register(state("d1")).superseded == []
    assert directory.find(key("t", "c")) == kept_by("d2", "two")


def test_of_two_replicas_that_tell_of_a_turn_the_one_used_last_counts() -> None:
    """A new directory hears of both, in any order."""
    older, newer = kept_by("d1", "one", 100.0), kept_by("d2", "two", 400.0)
    for told in ((older, newer), (newer, older)):
        directory = KVDirectory(clock=Clock())
        for handle in told:
            directory.keep(handle)
        assert directory.find(key("t", "c")) == newer
        assert directory.register(state("d1")).superseded == ["one"]
        assert directory.register(state("d2")).superseded == []
        directory.check_integrity()


def test_a_turn_that_was_found_is_not_newer_than_one_that_is_told_late() -> None:
    """The directory stood still; first it answers a find that nobody waits for any more."""
    clock = Clock()
    directory = KVDirectory(clock=clock)
    directory.keep(kept_by("d1", "one"))
    clock.now += 10.0  # two seconds ago the next turn was kept
    directory.find(key("t", "c"))
    newer = kept_by("d2", "two", 478.0)
    directory.keep(newer)
    assert directory.find(key("t", "c")) == newer
    assert directory.register(state("d1")).superseded == ["one"]
    assert directory.register(state("d2")).superseded == []


def test_nothing_is_told_or_kept_of_a_lease_that_has_ended_by_itself() -> None:
    clock = Clock()
    directory = KVDirectory(clock=clock)
    directory.keep(kept_by("d1", "one"))
    directory.keep(kept_by("d2", "two"))
    clock.now += 480.0
    assert directory.register(state("d1")).superseded == []
    directory.check_integrity()


def test_a_tenant_with_many_conversations_pushes_out_its_own() -> None:
    directory = KVDirectory(handles_kept=10, clock=Clock())
    for number in range(3):
        directory.keep(handle_of("small", str(number)))
    for number in range(1000):
        directory.keep(handle_of("greedy", str(number)))
        directory.check_integrity()
    assert all(directory.find(key("small", str(number))) for number in range(3))
    found = [n for n in range(1000) if directory.find(key("greedy", str(n))) is not None]
    assert found == list(range(993, 1000))


def test_of_one_engines_turns_the_later_granted_counts_whichever_is_told_last() -> None:
    """Two turns of a conversation may end in the same instant."""
    earlier = msgspec.structs.replace(kept_by("d1", "one"), number=4)
    later = msgspec.structs.replace(kept_by("d1", "two"), number=5)
    for told in ((earlier, later), (later, earlier)):
        directory = KVDirectory(clock=Clock())
        for handle in told:
            directory.keep(handle)
        assert directory.find(key("t", "c")) == later
        directory.check_integrity()
    reborn = msgspec.structs.replace(kept_by("d1", "three"), epoch=Epoch(2), number=0)
    directory.keep(reborn)
    assert directory.find(key("t", "c")) == reborn
