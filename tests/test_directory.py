"""The directory: who renews stays, who does not is gone, and a new one says that it is new."""

from td_serve.directory import KVDirectory
from td_serve.types import Epoch, ReplicaId, ReplicaState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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
    assert first.register(state("a")) == first.register(state("b")) == first.epoch
    assert second.register(state("a")) != first.epoch
