"""What was said before is found in prompts, wherever it stands."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from td_serve.quotes import SHORTEST, Quotes

# Two alphabets, so that what stands around a text is never a part of it.
texts = st.lists(
    st.lists(st.integers(0, 3), min_size=SHORTEST + 4, max_size=60), min_size=1, max_size=4
)
own = st.lists(st.integers(10, 12), max_size=80)


def pieces(prompt: list[int], places: list[int]) -> list[list[int]]:
    edges = [0, *places, len(prompt)]
    return [prompt[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, st.data())
def test_every_text_begins_a_segment(said: list[list[int]], data: st.DataObject) -> None:
    """Its first two tokens and its last two may have been merged with others."""
    order = data.draw(st.permutations(range(len(said))))
    prompt: list[int] = [*data.draw(own)]
    begins, ends = [], []
    for number in order:
        prompt += [7, 8]
        begins.append(len(prompt))
        prompt += said[number][2:-2]
        ends.append(len(prompt))
        prompt += [8, 9, *data.draw(own)]
    found = Quotes(said).cuts(prompt)
    assert found == sorted(set(found))
    assert set(begins) <= set(found)
    assert found[-1] == ends[-1], "what follows the last one is nobody's"
    for begin, end, following in zip(begins, ends, [*begins[1:], None], strict=True):
        if following is not None:
            # Little between two texts is the first one's; much is not.
            assert (end in found) == (following - end > 32 or end == following), (begin, end)


@given(texts, st.data())
def test_cuts_are_where_texts_begin_or_end(said: list[list[int]], data: st.DataObject) -> None:
    """Noise, whole texts and broken ones: every cut stands at an edge of a text that is there."""
    inner = [text[2:-2] for text in said]
    noise = st.lists(st.integers(0, 3), max_size=20)
    broken = st.sampled_from(said).map(lambda text: text[: len(text) // 2])
    some = st.lists(noise | broken | st.sampled_from(inner), max_size=8)
    prompt = [token for part in [*data.draw(some), inner[0]] for token in part]
    assert Quotes(said).cuts(prompt), "one is there"
    for place in Quotes(said).cuts(prompt):
        assert any(
            prompt[place : place + len(text)] == text
            or (place >= len(text) and prompt[place - len(text) : place] == text)
            for text in inner
        )


def test_what_is_short_or_not_there_cuts_nothing() -> None:
    assert Quotes([list(range(10)), list(range(200, 260))]).cuts(list(range(100))) == []
    assert Quotes([list(range(40))]).cuts([]) == []
    assert Quotes([]).cuts(list(range(40))) == []


def test_the_longer_of_two_texts_that_begin_alike_is_found() -> None:
    short, longer = list(range(30)), list(range(50))
    prompt = [99, *longer, 98]
    assert pieces(prompt, Quotes([short, longer]).cuts(prompt))[1] == longer[2:-2]
