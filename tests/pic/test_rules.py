"""Recovery rules: which of a canonical sequence's tokens members compute."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.pic.base import Shared
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


def chosen(
    spans: list[Span], rule: Rule, page_tokens: int = 4, deviations: Sequence[float] = ()
) -> list[bool]:
    tokens = spans[-1].start + spans[-1].tokens if spans else HEADER
    mask = recovery(rule, page_tokens).chosen(Shared(tokens, spans, deviations))
    assert mask is not None
    assert len(mask) == tokens
    return mask


def places(spans: list[Span]) -> list[int]:
    return [span.start + offset for span in spans for offset in range(span.tokens)]


def places_chosen(mask: list[bool]) -> set[int]:
    return {place for place, is_chosen in enumerate(mask) if is_chosen}


@given(segments(), st.integers(0, 12))
def test_first_k_is_the_beginning_of_every_segment(spans: list[Span], k: int) -> None:
    mask = chosen(spans, Rule(name=RuleName.FIRST_K, k=k))
    wanted = {span.start + offset for span in spans for offset in range(min(k, span.tokens))}
    assert places_chosen(mask) == wanted


@given(segments(), st.integers(0, 4))
def test_first_pages_are_the_beginning_of_the_whole_shared_part(
    spans: list[Span], pages: int
) -> None:
    mask = chosen(spans, Rule(name=RuleName.FIRST_PAGES, k=pages))
    assert places_chosen(mask) == set(places(spans)[: 4 * pages])


@pytest.mark.parametrize(("name", "share"), [(RuleName.FULL, 1.0), (RuleName.NONE, 0.0)])
@given(spans=segments())
def test_everything_and_nothing(spans: list[Span], name: RuleName, share: float) -> None:
    mask = chosen(spans, Rule(name=name))
    assert sum(mask) == share * len(mask)


MOST = HEADER + 4 * 9
ratios = st.floats(0, 1)
some_deviations = st.lists(st.floats(0.001, 5), min_size=MOST, max_size=MOST)


@given(segments(), ratios, some_deviations)
def test_the_highest_deviations_are_chosen_and_no_more_than_the_ratio(
    spans: list[Span], ratio: float, deviations: list[float]
) -> None:
    found = places_chosen(chosen(spans, Rule(name=RuleName.HKVD, ratio=ratio), 4, deviations))
    assert len(found) == round(ratio * len(places(spans)))
    assert found <= set(places(spans)), "what stands before is nobody's"
    left = set(places(spans)) - found
    # Of equals the earlier one.
    assert all((-deviations[a], a) < (-deviations[b], b) for a in found for b in left)


@given(segments(), st.floats(0, 3), some_deviations)
def test_as_many_are_chosen_as_it_takes_and_none_more(
    spans: list[Span], left: float, deviations: list[float]
) -> None:
    rule = Rule(name=RuleName.HKVD, ratio=1.0, left=left)
    found = sorted(places_chosen(chosen(spans, rule, 4, deviations)), key=lambda p: deviations[p])
    every = places(spans)

    def rest(chosen: Sequence[int]) -> float:
        return sum(deviations[place] for place in every if place not in chosen)

    close = 1e-9 * len(every)
    assert rest(found) <= left * len(every) + close
    if found:  # without the least of them it would have been too little
        assert rest(found[1:]) > left * len(every) - close


@given(segments(), ratios, st.floats(0.001, 3), some_deviations)
def test_where_a_goal_takes_more_than_the_ratio_nothing_is_chosen(
    spans: list[Span], ratio: float, left: float, deviations: list[float]
) -> None:
    tokens = spans[-1].start + spans[-1].tokens if spans else HEADER
    shared = Shared(tokens, spans, deviations)
    enough = chosen(spans, Rule(name=RuleName.HKVD, ratio=1.0, left=left), 4, deviations)
    found = recovery(Rule(name=RuleName.HKVD, ratio=ratio, left=left), 4).chosen(shared)
    if sum(enough) <= round(ratio * len(places(spans))):
        assert found == enough
    else:
        assert found is None


@given(segments(), ratios, some_deviations, st.integers(2, 5))
def test_whole_runs_are_chosen(
    spans: list[Span], ratio: float, deviations: list[float], run: int
) -> None:
    rule = Rule(name=RuleName.HKVD, ratio=ratio, run=run)
    found = places_chosen(chosen(spans, rule, 4, deviations))
    assert len(found) <= round(ratio * len(places(spans)))
    every = places(spans)
    for start in range(0, len(every), run):
        assert len(found & set(every[start : start + run])) in (0, len(every[start : start + run]))


@pytest.mark.parametrize(
    ("both", "alone"),
    [
        (RuleName.FIRST_K_HKVD, RuleName.FIRST_K),
        (RuleName.FIRST_PAGES_HKVD, RuleName.FIRST_PAGES),
    ],
)
@given(spans=segments(), ratio=ratios, deviations=some_deviations)
def test_beginnings_count_in_the_ratio(
    both: RuleName, alone: RuleName, spans: list[Span], ratio: float, deviations: list[float]
) -> None:
    first = places_chosen(chosen(spans, Rule(name=alone, k=2), 2))
    found = places_chosen(chosen(spans, Rule(name=both, k=2, ratio=ratio), 2, deviations))
    assert first <= found
    assert len(found) == max(len(first), round(ratio * len(places(spans))))


@pytest.mark.parametrize(("layers", "depth", "layer"), [(30, 0.2, 6), (2, 0.0, 1), (4, 1.0, 3)])
def test_a_share_of_the_layers_is_looked_at_and_never_the_first_alone(
    layers: int, depth: float, layer: int
) -> None:
    """Layer 0 has no deviations: it sees tokens and nothing else."""
    assert recovery(Rule(name=RuleName.HKVD, depth=depth), 4).check_layer(layers) == layer
    assert recovery(Rule(name=RuleName.FIRST_K), 4).check_layer(layers) is None


@given(segments(), st.floats(0.01, 1.0), st.floats(0, 200), some_deviations)
def test_what_stands_behind_counts_as_if_it_deviated(
    spans: list[Span], left: float, behind: float, deviations: list[float]
) -> None:
    """Shared tokens and a member's own behind them are left as much together as shared ones are
    where they stand alone."""
    tokens = spans[-1].start + spans[-1].tokens if spans else HEADER
    shared = Shared(tokens, spans, deviations, behind=behind)
    found = recovery(Rule(name=RuleName.HKVD, ratio=1.0, left=left), 4).chosen(shared)
    assert found is not None
    every = places(spans)
    rest = sum(deviations[at] for at in every if not found[at])
    mean = rest / max(1, len(every))
    assert mean * (len(every) + behind) <= left * len(every) + 1e-9 * (1 + behind)
    alone = recovery(Rule(name=RuleName.HKVD, ratio=1.0, left=left), 4).chosen(
        Shared(tokens, spans, deviations)
    )
    assert alone is not None
    assert all(now or not before for before, now in zip(alone, found, strict=True))
