"""Nothing is computed anew."""

from __future__ import annotations

from td_serve.pic.base import Settled, Shared


class Nothing(Settled):
    def chosen(self, shared: Shared) -> list[bool]:
        return [False] * shared.tokens
