"""Keys: the same for the same tokens in the same scope, and for nothing else."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from td_serve.segments import KEY_BYTES, SEPARATOR, key, locate, mark, split, tokenise

scopes = st.lists(st.text(max_size=6), max_size=3)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8)


@given(scopes, tokens, scopes, tokens)
def test_two_keys_are_the_same_only_for_the_same(
    scope: list[str], ids: list[int], other_scope: list[str], other_ids: list[int]
) -> None:
    assert (key(scope, ids) == key(other_scope, other_ids)) == (
        (scope, ids) == (other_scope, other_ids)
    )


def test_a_key_is_the_same_in_every_process() -> None:
    assert key(("model", "", "tenant"), [1, 2, 3]) == "412d7b6c9748494cd3919aa1d4c08ee3"
    assert len(key((), [])) == 2 * KEY_BYTES


def by_character(text: str) -> list[int]:
    return [ord(character) for character in text]


parts = st.lists(st.text("ab <TSEP>\n", max_size=5), max_size=5)


@given(parts)
def test_segments_are_what_was_marked_but_for_empty_ones(texts: list[str]) -> None:
    """Whatever looks like half a separator stays what it is."""
    assert split(mark(texts)) == [part for text in texts for part in split(text)]
    assert SEPARATOR not in "".join(split(mark(texts)))
    assert "".join(split(mark(texts), "|")) == "|".join(mark(texts).split(SEPARATOR))


def trimmed(text: list[str]) -> list[str]:
    """A text's segments without the white space at its ends, nor those that are nothing else."""
    left = len("".join(text)) - len("".join(text).lstrip())
    right = len("".join(text).rstrip())
    edges = [0, *itertools.accumulate(map(len, text))]
    spans = [(max(a, left), min(b, right)) for a, b in itertools.pairwise(edges)]
    return ["".join(text)[a:b] for a, b in spans if a < b]


@given(st.lists(parts, max_size=3), st.booleans())
@example(sent=[["< "], ["< <"]], trims=True)
def test_every_segment_is_cut_out_of_the_rendered_prompt(
    sent: list[list[str]], trims: bool
) -> None:
    """A template puts something around each text, and some take white space off its ends."""
    texts = [split(mark(one)) for one in sent]
    bodies = ["".join(one) for one in texts]
    rendered = "".join(f"[{body.strip() if trims else body}]" for body in bodies)
    tokens, cuts = tokenise(rendered, locate(rendered, texts), by_character)
    assert tokens == by_character(rendered), "nothing is lost"
    assert cuts == sorted(set(cuts))
    edges = [0, *cuts, len(tokens)]
    found = ["".join(map(chr, tokens[a:b])) for a, b in itertools.pairwise(edges)]
    if trims:
        texts = [trimmed(one) for one in texts]
    if texts and all(texts):
        # Each text's last segment has what the template put after it.
        wanted = ["["]
        for number, one in enumerate(texts, start=1):
            wanted += [*one[:-1], one[-1] + ("][" if number < len(texts) else "]")]
        assert found == wanted


def test_a_text_that_the_template_has_changed_is_not_cut_and_those_after_it_are() -> None:
    rendered = "[A B][cd]"
    places = locate(rendered, [["a ", "b"], ["c", "d"]])
    found = [rendered[a:b] for a, b in itertools.pairwise([*places, len(rendered)])]
    assert found == ["c", "d]"]


def test_each_segment_is_encoded_by_itself() -> None:
    seen = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [len(text)]

    assert tokenise("abcdef", [2, 2, 5, 6], encode) == ([2, 3, 1], [1, 2])
    assert seen == ["ab", "cde", "f"]


def test_a_text_is_not_looked_for_within_words_where_it_stands_as_it_is() -> None:
    assert locate("look\nok\n", [["\nok\n"]]) == [4]
