"""Rows: every token is history, taken from the canonical sequence or computed, exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.rows import Extent, check, layout
from td_serve.types import Piece

CANONICAL = 40


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    history = draw(st.integers(0, 20))
    end = history
    pieces = []
    for _ in range(draw(st.integers(0, 4))):
        start = end + draw(st.integers(0, 5))
        tokens = draw(st.integers(1, 15))
        pieces.append(
            Piece(start=start, tokens=tokens, source=draw(st.integers(0, CANONICAL - tokens)))
        )
        end = start + tokens
    return Extent(tokens=max(1, end + draw(st.integers(0, 6))), history=history, pieces=pieces)


groups = st.lists(extents(), min_size=1, max_size=4)
choices = st.lists(st.booleans(), min_size=CANONICAL, max_size=CANONICAL)


@given(groups, choices, st.sampled_from([1, 4, 32]))
def test_each_token_is_accounted_for_once(
    members: list[Extent], chosen: list[bool], block_size: int
) -> None:
    rows = layout(members, [chosen] * len(members), block_size)
    for member, share in zip(members, rows.shares, strict=True):
        check(member, CANONICAL)
        computed = rows.positions[share.first : share.last]
        assert sorted([*range(member.history), *share.cached, *computed]) == list(
            range(member.tokens)
        )
        named = {
            piece.start + offset: piece.source + offset
            for piece in member.pieces
            for offset in range(piece.tokens)
        }
        assert dict(zip(share.cached, share.sources, strict=True)) == {
            position: source for position, source in named.items() if not chosen[source]
        }


@given(groups, choices, st.sampled_from([1, 4, 32]))
def test_no_two_tokens_share_a_slot_and_none_is_outside(
    members: list[Extent], chosen: list[bool], block_size: int
) -> None:
    rows = layout(members, [chosen] * len(members), block_size)
    assert len(set(rows.slots)) == len(rows.slots)
    taken = set()
    for member, share in zip(members, rows.shares, strict=True):
        base = share.block * block_size
        mine = {base + position for position in range(member.tokens)}
        assert not mine & taken
        taken |= mine
        assert rows.slots[share.first : share.last] == [
            base + position for position in rows.positions[share.first : share.last]
        ]
    assert max(taken) < rows.blocks * block_size


@given(groups, choices)
def test_a_run_ends_where_its_sequence_does(members: list[Extent], chosen: list[bool]) -> None:
    """The kernel's causality counts back from a sequence's end: it must be the run's last token."""
    rows = layout(members, [chosen] * len(members), 4)
    assert rows.starts[-1] == len(rows.positions)
    for run, length in enumerate(rows.lengths):
        first, last = rows.starts[run], rows.starts[run + 1]
        assert rows.positions[first:last] == list(range(length - (last - first), length))


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        (Extent(tokens=4, history=5, pieces=[]), "history: 5, expected 0 to 4"),
        (Extent(tokens=9, history=4, pieces=[Piece(start=3, tokens=2, source=0)]), "at 3"),
        (Extent(tokens=9, history=0, pieces=[Piece(start=8, tokens=2, source=0)]), "up to 10"),
        (Extent(tokens=9, history=0, pieces=[Piece(start=0, tokens=2, source=39)]), "from 39"),
        (Extent(tokens=9, history=0, pieces=[Piece(start=0, tokens=0, source=0)]), "one token"),
    ],
)
def test_what_does_not_fit_is_refused(extent: Extent, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(extent, CANONICAL)
