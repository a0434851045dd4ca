"""Rounds that go by without a pass, after one that was for nothing."""

from __future__ import annotations

from td_serve.engine.sparing import MOST_ROUNDS, MOST_SESSIONS, Sparing


def rounds_until_a_try(sparing: Sparing, session: str) -> int:
    rounds = 0
    while sparing.will_spare(session):
        assert sparing.spares(session)
        rounds += 1
    assert not sparing.spares(session)
    return rounds


def test_passes_for_nothing_are_tried_less_and_less_often_and_one_that_is_made_ends_that() -> None:
    sparing = Sparing()
    assert rounds_until_a_try(sparing, "one") == 0
    for rounds in (1, 3, 7, MOST_ROUNDS, MOST_ROUNDS):
        sparing.learn("one", was_for_nothing=True)
        assert rounds_until_a_try(sparing, "one") == rounds
        assert rounds_until_a_try(sparing, "two") == 0, "another's session"
    sparing.learn("one", was_for_nothing=False)
    assert rounds_until_a_try(sparing, "one") == 0
    sparing.learn("one", was_for_nothing=True)
    assert rounds_until_a_try(sparing, "one") == 1


def test_the_session_that_failed_longest_ago_is_forgotten() -> None:
    sparing = Sparing()
    for number in range(MOST_SESSIONS + 1):
        sparing.learn(str(number), was_for_nothing=True)
    assert not sparing.spares("0")
    assert sparing.spares("1")
    assert sparing.spares(str(MOST_SESSIONS))
