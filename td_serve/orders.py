"""One order for sequences that have much in common, and what of each stands in it. Pure.

A text may stand in a sequence more than once, as in a transcript of rounds in which somebody says
the same again: the order then has it as often, and which of them is meant goes by what stands
around. To look at all pairs of equal texts would let a sequence of one text, again and again, take
quadratic time: the n-th of a sequence is compared with the order's (n ± `_NEAR`)-th alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from td_serve.types import SegmentKey

_NEAR = 4


def one_order(
    sequences: Iterable[Sequence[SegmentKey]], tokens: Mapping[SegmentKey, int]
) -> list[SegmentKey]:
    """The sequence that most have, then what others have more: behind what it stands behind there.

    What fewer than two of them have in this order is left out. `tokens` says how long each text is.
    """
    counts = Counter(tuple(one) for one in sequences)
    order: list[SegmentKey] = []
    # Of as many the one that says more, then the first.
    for sequence in sorted(counts, key=lambda one: (-counts[one], -len(one))):
        order = _merged(order, sequence, tokens)
    users = Counter[int]()
    for sequence, count in counts.items():
        for place in aligned(sequence, order, tokens):
            if place is not None:
                users[place] += count
    return [one for place, one in enumerate(order) if users[place] > 1]


def aligned(
    sequence: Sequence[SegmentKey], order: Sequence[SegmentKey], tokens: Mapping[SegmentKey, int]
) -> list[int | None]:
    """Where in the order each of a sequence's texts stands; None for those that are not in it, or
    stand elsewhere. Places ascend; the texts that have one are together as long as can be."""
    best = _Longest(len(order))
    chains: list[_Chain] = []
    places = _places(order)
    seen = Counter[SegmentKey]()
    for at, one in enumerate(sequence):
        there = places.get(one, [])
        first = max(0, seen[one] - _NEAR)
        near = there[first : seen[one] + _NEAR + 1]
        seen[one] += 1
        # From the last on: none may follow another of the same text.
        for place in reversed(near):
            length, before = best.until(place)
            chains.append((at, place, before))
            best.put(place, length + tokens[one], len(chains) - 1)
    found: list[int | None] = [None] * len(sequence)
    _, last = best.until(len(order))
    while last is not None:
        at, place, last = chains[last]
        found[at] = place
    return found


_Chain = tuple[int, int, int | None]
"""A text's place in its sequence, its place in the order, and the chain that it goes on from."""


class _Longest:
    """The longest chain that ends before a place: a binary indexed tree of maxima (P. Fenwick, A
    new data structure for cumulative frequency tables, 1994)."""

    def __init__(self, places: int) -> None:
        self._tree: list[tuple[int, int | None]] = [(0, None)] * (places + 1)

    def until(self, place: int) -> tuple[int, int | None]:
        """Its length and number; (0, None) if there is none."""
        best: tuple[int, int | None] = (0, None)
        while place > 0:
            if self._tree[place][0] > best[0]:
                best = self._tree[place]
            place &= place - 1
        return best

    def put(self, place: int, length: int, number: int) -> None:
        """A chain that ends at `place`; of those as long the first one counts."""
        place += 1
        while place < len(self._tree):
            if length > self._tree[place][0]:
                self._tree[place] = (length, number)
            place += place & -place


def _merged(
    order: list[SegmentKey], sequence: Sequence[SegmentKey], tokens: Mapping[SegmentKey, int]
) -> list[SegmentKey]:
    merged: list[SegmentKey] = []
    done = 0
    for one, place in zip(sequence, aligned(sequence, order, tokens), strict=True):
        if place is None:
            merged.append(one)
        else:
            merged += order[done : place + 1]
            done = place + 1
    return merged + order[done:]


def _places(order: Sequence[SegmentKey]) -> dict[SegmentKey, list[int]]:
    places: dict[SegmentKey, list[int]] = {}
    for place, one in enumerate(order):
        places.setdefault(one, []).append(place)
    return places
