"""The beginning is computed anew: of every segment (EPIC, arXiv 2410.15332), or of the whole.

A segment's first tokens draw attention that belongs to a text's beginning; after other tokens they
would not. Whole pages at the beginning of the shared part adjoin a member's own text.
"""

from __future__ import annotations

from td_serve.pic.base import Settled, Shared, mask


class FirstTokens(Settled):
    """The first `tokens` tokens of each segment."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def chosen(self, shared: Shared) -> list[bool]:
        return mask(
            shared,
            [
                span.start + offset
                for span in shared.segments
                for offset in range(min(self._tokens, span.tokens))
            ],
        )


class FirstPages(Settled):
    """The first `pages` pages of `page_tokens` tokens of the whole shared part."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._tokens = pages * page_tokens

    def chosen(self, shared: Shared) -> list[bool]:
        return mask(shared, shared.places()[: self._tokens])
