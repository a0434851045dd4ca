"""Cutting to the window: it fits, in the stated order, told exactly, and never more than needed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.errors import ReplayError
from td_serve.sim.layouts import Kind, Layout, Prompt, build
from td_serve.sim.window import Cut, cut_to_window, drop_steps
from td_serve.sim.workload import View
from td_serve.types import AgentId
from tests.sim.strategies import all_views

RESERVED = 5
views_and_layouts = given(all_views(), st.sampled_from(Layout), st.integers(0, 400))


def count(messages: Sequence[dict[str, str]]) -> int:
    """A token a character and two a message: simple, and grows with every part."""
    return sum(len(message["content"]) + 2 for message in messages)


def cut(prompt: Prompt, window: int) -> Cut | None:
    """The cut prompt; None if it is refused."""
    try:
        return cut_to_window(prompt, window, RESERVED, count)
    except ReplayError:
        return None


@views_and_layouts
def test_what_is_cut_fits_and_counts_are_true(view: View, layout: Layout, window: int) -> None:
    prompt = build(layout, view)
    result = cut(prompt, window)
    if result is None:
        return
    assert result.tokens_before == count(prompt.chat())
    assert result.tokens == count(result.prompt.chat())
    assert result.tokens + RESERVED <= window


@views_and_layouts
def test_drops_are_whole_reported_exactly_and_keep_the_order(
    view: View, layout: Layout, window: int
) -> None:
    prompt = build(layout, view)
    result = cut(prompt, window)
    if result is None:
        return
    kept = list(result.prompt.parts)
    assert len(kept) + len(result.dropped) == len(prompt.parts)
    remaining = iter(prompt.parts)
    assert all(any(part is other for other in remaining) for part in kept)
    assert {id(p) for p in kept} | {id(p) for p in result.dropped} == {id(p) for p in prompt.parts}


@views_and_layouts
def test_preamble_profile_and_task_are_never_dropped(
    view: View, layout: Layout, window: int
) -> None:
    prompt = build(layout, view)
    result = cut(prompt, window)
    if result is None:
        return
    for part in prompt.parts:
        if part.kind not in (Kind.HISTORY, Kind.SHARED):
            assert part in result.prompt.parts


@views_and_layouts
def test_drops_follow_the_rule_from_its_start(view: View, layout: Layout, window: int) -> None:
    prompt = build(layout, view)
    result = cut(prompt, window)
    if result is None:
        return
    rule = [prompt.parts[index] for step in drop_steps(prompt) for index in step]
    assert list(result.dropped) == rule[: len(result.dropped)]
    earlier = [part.round for part in rule if part.round < prompt.round]
    assert earlier == sorted(earlier)
    now = [part.kind for part in rule if part.round == prompt.round]
    assert now == sorted(now, key=[Kind.HISTORY, Kind.SHARED].index)


@views_and_layouts
def test_a_larger_window_never_drops_more(view: View, layout: Layout, window: int) -> None:
    prompt = build(layout, view)
    smaller, larger = cut(prompt, window), cut(prompt, window + 1)
    if smaller is not None:
        assert larger is not None
        assert len(larger.dropped) <= len(smaller.dropped)
        assert smaller.dropped[: len(larger.dropped)] == larger.dropped


@views_and_layouts
def test_no_step_was_dropped_that_could_have_stayed(
    view: View, layout: Layout, window: int
) -> None:
    prompt = build(layout, view)
    result = cut(prompt, window)
    steps = drop_steps(prompt)
    if result is None:
        gone = {index for step in steps for index in step}
    elif not result.dropped:
        return
    else:
        taken = 0
        gone = set()
        for step in steps:
            if taken + len(step) >= len(result.dropped):
                break
            gone |= set(step)
            taken += len(step)
    start = 0
    tokens = 0
    for message in prompt.messages:
        numbered = enumerate(message.parts, start)
        texts = [part.text for index, part in numbered if index not in gone]
        start += len(message.parts)
        if texts:
            tokens += len("\n\n".join(texts)) + 2
    assert tokens + RESERVED > window


def test_a_refusal_names_the_agent_and_all_sizes() -> None:
    view = View(
        agent=AgentId("Ines"),
        round=0,
        preamble="",
        profile="p" * 50,
        history=(),
        shared=(),
        task="t" * 50,
    )
    with pytest.raises(ReplayError, match=r"'Ines' in round 0 has 104 tokens.* 60 leaves 55 .* 5 "):
        cut_to_window(build(Layout.HISTORY_FIRST, view), 60, RESERVED, count)
