"""One order for all: it has what is common, and what comes again as often as it does."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from td_serve.orders import aligned, one_order
from td_serve.types import SegmentKey

TOKENS = {
    SegmentKey(name): length for name, length in zip("abcdef", [1, 2, 3, 5, 8, 13], strict=True)
}

sequences = st.lists(st.sampled_from(sorted(TOKENS)), max_size=8)


def keys(text: str) -> list[SegmentKey]:
    return [SegmentKey(one) for one in text]


def tokens(sequence: list[SegmentKey], places: list[int | None]) -> int:
    return sum(
        TOKENS[one] for one, place in zip(sequence, places, strict=True) if place is not None
    )


def test_what_is_said_again_stands_in_the_order_again() -> None:
    order = one_order([keys("abacab")] * 2, TOKENS)
    assert order == keys("abacab")
    assert aligned(keys("abacab"), order, TOKENS) == [0, 1, 2, 3, 4, 5]


def test_what_one_repeats_for_itself_is_its_own() -> None:
    """In a transcript in which each keeps a record of its own words beside what all have heard."""
    ada, bo = keys("abacdcab"), keys("abbcddab")
    order = one_order([ada, bo], TOKENS)
    assert order == keys("abcdab")
    assert tokens(ada, aligned(ada, order, TOKENS)) == sum(TOKENS[one] for one in order)


def test_what_most_have_counts_and_what_others_have_more_is_put_between() -> None:
    order = one_order([keys("bca"), keys("abd"), keys("abd"), keys("abcd"), keys("abcd")], TOKENS)
    assert order == keys("abcd")


@given(st.lists(sequences, max_size=5))
def test_what_has_been_said_so_far_stays_where_it_stands(rounds: list[list[SegmentKey]]) -> None:
    """All hear the same, round after round: each order begins with the last one."""
    said: list[SegmentKey] = []
    before: list[SegmentKey] = []
    for outputs in rounds:
        said += outputs
        order = one_order([said, said, said], TOKENS)
        assert order[: len(before)] == before
        before = order
    assert before == said


@given(sequences, sequences)
def test_as_much_as_can_be_stands_in_the_order(
    sequence: list[SegmentKey], order: list[SegmentKey]
) -> None:
    places = aligned(sequence, order, TOKENS)
    found = [place for place in places if place is not None]
    assert found == sorted(set(found)), "places ascend"
    for one, place in zip(sequence, places, strict=True):
        assert place is None or order[place] == one
    if all(sequence.count(one) < 5 and order.count(one) < 5 for one in TOKENS):
        assert tokens(sequence, places) == longest(sequence, order)


def longest(some: list[SegmentKey], others: list[SegmentKey]) -> int:
    """The longest common subsequence in tokens, the textbook way."""
    rows = [[0] * (len(others) + 1)]
    for one in some:
        row = [0]
        for place, other in enumerate(others):
            row.append(
                max(row[-1], rows[-1][place + 1], rows[-1][place] + TOKENS[one] * (one == other))
            )
        rows.append(row)
    return rows[-1][-1]


@given(st.lists(sequences, min_size=1, max_size=5))
def test_whatever_is_in_the_order_at_least_two_have(found: list[list[SegmentKey]]) -> None:
    order = one_order(found, TOKENS)
    users = [0] * len(order)
    for sequence in found:
        for place in aligned(sequence, order, TOKENS):
            if place is not None:
                users[place] += 1
    shared = {one for one, two in itertools.combinations(map(set, found), 2) for one in one & two}
    assert set(order) <= shared
    if len({tuple(one) for one in found}) == 1 and len(found) > 1:
        assert order == found[0]
