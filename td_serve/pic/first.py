"""The beginning is computed anew: of every segment (EPIC, arXiv 2410.15332), or of the whole.

A segment's first tokens draw attention that belongs to a text's beginning; after other tokens they
would not. Whole pages at the beginning of the shared part adjoin a member's own text.
"""

from __future__ import annotations

from collections.abc import Sequence

from td_serve.types import Span


class FirstTokens:
    """The first `tokens` tokens of each segment."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def chosen(self, segments: Sequence[Span], tokens: int) -> list[bool]:
        mask = [False] * tokens
        for span in segments:
            count = min(self._tokens, span.tokens)
            mask[span.start : span.start + count] = [True] * count
        return mask


class FirstPages:
    """The first `pages` pages of `page_tokens` tokens of the whole shared part."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._tokens = pages * page_tokens

    def chosen(self, segments: Sequence[Span], tokens: int) -> list[bool]:
        mask = [False] * tokens
        left = self._tokens
        for span in segments:
            count = min(left, span.tokens)
            mask[span.start : span.start + count] = [True] * count
            left -= count
        return mask
