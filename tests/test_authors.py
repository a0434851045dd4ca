"""What turns have put out is found in a canonical sequence, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.authors import Turn, find_written
from td_serve.quotes import SHORTEST
from td_serve.types import LeaseId, Piece, Written

START = 100


def turn(token_ids: Sequence[int], number: int = 0, salt: str | None = None) -> Turn:
    """A turn that has put these tokens out, all kept but the last, which no engine has read."""
    return Turn(LeaseId(f"lease-{number}"), salt, START, token_ids, START + len(token_ids) - 1)


def said(seed: int, count: int = 40) -> list[int]:
    return [1000 * seed + number for number in range(count)]


outputs = st.lists(
    st.lists(st.integers(0, 3), min_size=SHORTEST, max_size=60), min_size=1, max_size=4
)


@given(outputs, st.data())
def test_what_is_found_is_there_and_kept_and_does_not_overlap(
    texts: list[list[int]], data: st.DataObject
) -> None:
    noise = st.lists(st.integers(0, 3), max_size=20)
    some = data.draw(st.lists(noise | st.sampled_from(texts), max_size=8))
    tokens = [token for part in some for token in part]
    turns = {f"lease-{number}": turn(text, number) for number, text in enumerate(texts)}
    end = 0
    for one in find_written(tokens, list(turns.values()), None):
        piece, of = one.piece, turns[one.name]
        assert piece.source >= end
        end = piece.source + piece.tokens
        first = piece.start - START
        assert piece.tokens > 0
        assert piece.start + piece.tokens <= of.kept
        assert list(of.token_ids[first : first + piece.tokens]) == tokens[piece.source : end]


@pytest.mark.parametrize(
    ("edges", "wanted"),
    [
        pytest.param((0, 40), (0, 39), id="all of it but the last token, of which no KV is kept"),
        pytest.param((1, 39), (1, 39), id="less than its edges"),
        pytest.param((2, 38), (2, 38), id="its edges are others"),
    ],
)
def test_an_output_is_found_as_far_as_it_is_the_same(
    edges: tuple[int, int], wanted: tuple[int, int]
) -> None:
    first, last = wanted
    tokens = [7, 8, *said(1)[slice(*edges)], 9]
    piece = Piece(start=START + first, tokens=last - first, source=2 + first - edges[0])
    assert find_written(tokens, [turn(said(1))], None) == [Written(name="lease-0", piece=piece)]


def test_all_places_of_all_outputs_are_found() -> None:
    tokens = [*said(1), *said(2), *said(1)]
    found = find_written(tokens, [turn(said(1), 1), turn(said(2), 2)], None)
    assert [(one.name, one.piece.source) for one in found] == [
        ("lease-1", 0),
        ("lease-2", 40),
        ("lease-1", 80),
    ]


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(turn(said(2)), id="another output"),
        pytest.param(turn([*said(1)[:-3], 1, 2, 3]), id="one that ends otherwise"),
        pytest.param(turn(said(1, SHORTEST + 3)), id="a short one"),
        pytest.param(turn(said(1), salt="theirs"), id="under another salt"),
        pytest.param(Turn(LeaseId("short"), None, START, said(1), START), id="not kept"),
    ],
)
def test_what_is_not_the_same_is_not_found(of: Turn) -> None:
    assert find_written([*said(1), 5], [of], None) == []
