"""Nothing is computed anew."""

from __future__ import annotations

from collections.abc import Sequence

from td_serve.types import Span


class Nothing:
    def chosen(self, segments: Sequence[Span], tokens: int) -> list[bool]:
        return [False] * tokens
