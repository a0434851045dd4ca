"""The threshold is where both ways take the same, by what has been measured."""

from hypothesis import given
from hypothesis import strategies as st

from td_serve.breakeven import LEAST_TOKENS, WEIGHT, BreakEven

seconds = st.floats(1e-6, 1.0)


@given(compute=seconds, read=seconds, ask=seconds)
def test_reading_is_chosen_where_it_is_quicker(compute: float, read: float, ask: float) -> None:
    measured = BreakEven(64)
    measured.computed(100, 100 * compute)
    measured.read(100, 100 * read)
    assert measured.tokens == 64, "asking has not been measured"
    measured.asked(ask)
    if (tokens := measured.tokens) is None:
        assert 100 * compute <= 100 * read * (1 + 1e-9)
        return
    assert ask + tokens * read <= tokens * compute * (1 + 1e-6)
    if tokens > 1:
        assert ask + (tokens - 1) * read >= (tokens - 1) * compute * (1 - 1e-6)


def test_the_newest_samples_weigh_most() -> None:
    measured = BreakEven(64)
    measured.asked(1.0)
    measured.read(100, 0.0)
    measured.computed(100, 100 * 0.01)
    assert measured.tokens == 100
    measured.computed(100, 100 * 0.02)
    assert measured.tokens == round(1.0 / (0.01 + WEIGHT * 0.01)) + 1
    for _ in range(100):
        measured.computed(100, 100 * 0.02)
    assert measured.tokens == 50 + 1 or measured.tokens == 50


def test_a_handful_of_tokens_says_nothing() -> None:
    measured = BreakEven(64)
    measured.asked(0.001)
    measured.read(100, 0.001)
    measured.computed(LEAST_TOKENS - 1, 100.0)
    assert measured.tokens == 64


def test_reading_that_did_not_pay_is_tried_again_after_a_while() -> None:
    measured = BreakEven(64)
    measured.asked(0.001)
    measured.computed(100, 100 * 0.01)
    measured.read(100, 100 * 0.02)
    assert measured.tokens is None
    computed = 0
    while measured.tokens is None:
        measured.computed(100, 100 * 0.01)
        computed += 1
    assert 50 < computed < 100
