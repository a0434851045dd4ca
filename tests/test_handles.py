"""Handles: what a prompt has in common with what is kept, token by token, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.handles import DIGEST_BYTES, common_tokens, digests, shorten
from td_serve.types import ConversationKey, Epoch, Handle, LeaseId, ReplicaId

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2), max_size=30)


def make_handle(tokens: list[int], salt: str | None = None) -> Handle:
    whole = len(tokens) // BLOCK * BLOCK
    return Handle(
        lease=LeaseId("lease"),
        conversation=ConversationKey("c"),
        replica=ReplicaId("decode-0"),
        epoch=Epoch(1),
        host="127.0.0.1",
        port=20500,
        tp_size=1,
        block_size=BLOCK,
        block_ids=[list(range(100, 100 + -(-len(tokens) // BLOCK)))],
        tokens=len(tokens),
        digests=digests(tokens, BLOCK, salt),
        tail=tokens[whole:],
        remaining_s=480.0,
    )


def common_prefix(first: list[int], second: list[int]) -> int:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


@given(TOKENS, TOKENS, TOKENS)
def test_the_common_prefix_is_found_in_whole_blocks_and_to_the_very_end(
    shared: list[int], kept: list[int], new: list[int]
) -> None:
    handle, prompt = make_handle(shared + kept), shared + new
    exact = common_prefix(shared + kept, prompt)
    in_tail = exact >= handle.tokens // BLOCK * BLOCK
    assert common_tokens(handle, prompt, None) == (exact if in_tail else exact // BLOCK * BLOCK)


@given(TOKENS)
def test_a_salt_keeps_apart_whole_blocks(tokens: list[int]) -> None:
    handle = make_handle(tokens, "tenant")
    assert common_tokens(handle, tokens, "tenant") == len(tokens)
    if len(tokens) >= BLOCK:
        assert common_tokens(handle, tokens, None) == 0
        assert common_tokens(handle, tokens, "other") == 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.data())
def test_a_shortened_handle_is_that_of_fewer_tokens(tokens: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, len(tokens)).filter(_is_a_common_prefix(len(tokens))))
    assert shorten(make_handle(tokens), wanted) == make_handle(tokens[:wanted])


def _is_a_common_prefix(tokens: int) -> Callable[[int], bool]:
    """`common_tokens` ends at whole blocks or in the tail."""
    return lambda wanted: wanted % BLOCK == 0 or wanted >= tokens // BLOCK * BLOCK


@pytest.mark.parametrize("tokens", [0, 10])
def test_a_handle_cannot_be_made_longer(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens: {tokens}, expected 1 to 9"):
        shorten(make_handle(list(range(9))), tokens)


def test_a_handle_is_small() -> None:
    handle = make_handle(list(range(8192)))
    assert len(handle.digests) == 8192 // BLOCK * DIGEST_BYTES
    assert handle.tail == []
