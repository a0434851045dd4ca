"""Recovery rules: which of a canonical sequence's tokens members compute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.pic.rules import recovery
from td_serve.types import Rule, RuleName, Span

HEADER = 5


@st.composite
def segments(draw: st.DrawFn) -> list[Span]:
    spans = []
    start = HEADER
    for count in draw(st.lists(st.integers(1, 9), max_size=4)):
        spans.append(Span(start=start, tokens=count))
        start += count
    return spans


def chosen(spans: list[Span], rule: Rule, page_tokens: int = 4) -> list[bool]:
    tokens = spans[-1].start + spans[-1].tokens if spans else HEADER
    mask = recovery(rule, page_tokens).chosen(spans, tokens)
    assert len(mask) == tokens
    return mask


@given(segments(), st.integers(0, 12))
def test_first_k_is_the_beginning_of_every_segment(spans: list[Span], k: int) -> None:
    mask = chosen(spans, Rule(name=RuleName.FIRST_K, k=k))
    wanted = {span.start + offset for span in spans for offset in range(min(k, span.tokens))}
    assert {place for place, is_chosen in enumerate(mask) if is_chosen} == wanted


@given(segments(), st.integers(0, 4))
def test_first_pages_are_the_beginning_of_the_whole_shared_part(
    spans: list[Span], pages: int
) -> None:
    mask = chosen(spans, Rule(name=RuleName.FIRST_PAGES, k=pages))
    shared = [span.start + offset for span in spans for offset in range(span.tokens)]
    assert [place for place, is_chosen in enumerate(mask) if is_chosen] == shared[: 4 * pages]


@pytest.mark.parametrize(("name", "share"), [(RuleName.FULL, 1.0), (RuleName.NONE, 0.0)])
@given(spans=segments())
def test_everything_and_nothing(spans: list[Span], name: RuleName, share: float) -> None:
    mask = chosen(spans, Rule(name=name))
    assert sum(mask) == share * len(mask)
