"""What a recovery rule decides.

KV that is taken from the canonical sequence was computed after other tokens than a member's own. A
rule names the shared tokens that are computed anew, where they stand, to recover what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from td_serve.types import Span


class Recovery(Protocol):
    """A rule that is settled before anything is computed."""

    def chosen(self, segments: Sequence[Span], tokens: int) -> list[bool]:
        """Of each of the canonical sequence's `tokens` tokens: whether members compute it.

        `segments` are the shared part, in order; what stands before it is nobody's.
        """
        ...
