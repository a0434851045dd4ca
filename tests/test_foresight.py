"""What is foreseen is what comes, where prompts are laid out as they were."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from td_serve.foresight import foresee
from td_serve.types import Canonical, Said, SegmentKey, Span

HEADER = "header: "


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def canonical(*segments: str) -> Canonical:
    tokens, spans = encode(HEADER), []
    for text in segments:
        spans.append(Span(start=len(tokens), tokens=len(text)))
        tokens += encode(text)
    return Canonical(key=SegmentKey("one"), token_ids=tokens, segments=spans)


def foreseen(last: Canonical, said: Sequence[Said], *, grows: bool = False) -> Canonical | None:
    return foresee(last, grows=grows, said=said, encode=encode, decode=decode)


# No text stands within another, or within what is around one.
letters = st.text("abcd", min_size=1, max_size=6)
texts = st.lists(letters.map(lambda text: f"<{text}>"), min_size=1, max_size=5, unique=True)
around = st.text("xyz: \n", max_size=5)


@given(texts, st.data())
def test_new_texts_stand_where_the_old_ones_did(old: list[str], data: st.DataObject) -> None:
    new = data.draw(st.lists(letters, min_size=len(old), max_size=len(old)))
    frames = [(data.draw(around), data.draw(around)) for _ in old]
    between = data.draw(st.integers(0, len(old)))

    def laid_out(said: list[str]) -> Canonical:
        framed = [f"{a}{text}{b}" for text, (a, b) in zip(said, frames, strict=True)]
        return canonical(*framed[:between], "a word of nobody's", *framed[between:])

    said = [Said(before=one, now=other) for one, other in zip(old, new, strict=True)]
    found = foreseen(laid_out(old), data.draw(st.permutations(said)))
    assert found == laid_out(new)


@given(texts, st.data())
def test_as_far_as_it_is_known_it_is_how_the_whole_begins(
    old: list[str], data: st.DataObject
) -> None:
    known = data.draw(st.integers(0, len(old) - 1))
    said = [
        Said(before=text, now=text.upper() if place < known else None)
        for place, text in enumerate(old)
    ]
    found = foreseen(canonical(*old), said)
    if known:
        assert found == canonical(*(text.upper() for text in old[:known]))
    else:
        assert found is None


@given(texts, texts)
def test_a_sequence_that_grows_is_kept_and_goes_on(older: list[str], old: list[str]) -> None:
    older = [text.replace("<", "[") for text in older]
    said = [Said(before=text, now=text.upper()) for text in old]
    found = foreseen(canonical(*older, *old), said, grows=True)
    assert found == canonical(*older, *old, *(text.upper() for text in old))


def test_who_says_nothing_any_more_is_left_out() -> None:
    said = [Said(before="<a>", now=""), Said(before="<b>", now="new")]
    assert foreseen(canonical("<a>!", "<b>!"), said) == canonical("new!")


def test_nothing_is_foreseen_of_what_nobody_said() -> None:
    last = canonical("handed in by the client")
    assert foreseen(last, [Said(before="<a>", now="new")]) is None
    assert foreseen(last, [Said(before="", now="new")]) is None
    assert foreseen(canonical("<a>"), [Said(before="<a>", now="")]) is None


@given(texts, st.booleans())
def test_of_nothing_said_nothing_is_foreseen(old: list[str], grows: bool) -> None:
    assert foreseen(canonical(*old), [], grows=grows) is None
    nobody = [Said(before="", now="something")]
    assert foreseen(canonical(*old), nobody, grows=grows) is None
