"""Keys: the same for the same tokens in the same scope, and for nothing else."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from td_serve.segments import KEY_BYTES, SEPARATOR, key, tokenise

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


texts = st.lists(st.text("ab <TSEP>", max_size=5), max_size=6)


@given(texts)
def test_no_separator_is_left_and_every_segment_has_its_own_tokens(parts: list[str]) -> None:
    text = SEPARATOR.join(parts)
    tokens, cuts = tokenise(text, by_character)
    assert tokens == by_character(text.replace(SEPARATOR, ""))
    edges = [0, *cuts, len(tokens)]
    found = [tokens[start:end] for start, end in itertools.pairwise(edges)]
    wanted = [by_character(part) for part in text.split(SEPARATOR)]
    assert [part for part in found if part] == [part for part in wanted if part]
    assert cuts == sorted(set(cuts)), "empty segments are none"


@given(texts, texts)
def test_a_segment_has_the_same_tokens_wherever_it_stands(
    before: list[str], after: list[str]
) -> None:
    tokens, cuts = tokenise(SEPARATOR.join([*before, "abc", *after]), by_character)
    edges = [0, *cuts, len(tokens)]
    assert by_character("abc") in [tokens[start:end] for start, end in itertools.pairwise(edges)]
