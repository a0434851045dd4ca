"""The turns in which was said what a round's members share: who spoke the round before."""

from __future__ import annotations

from collections.abc import Sequence

from td_serve.authors import Turn
from td_serve.bench.trace_rounds import Spoken
from td_serve.types import LeaseId, Written


class Authors:
    """Everybody's turn of one round, where it fits the window. The last token of an output has no
    KV: nobody has read it."""

    def __init__(self, number: int, spoken: Sequence[Spoken], window: int) -> None:
        self._spoken = {
            LeaseId(f"{number}-{one.agent}"): one
            for one in spoken
            if len(one.prompt) + len(one.put_out) < window
        }
        self.turns = [
            Turn(
                lease=lease,
                salt=None,
                start=len(one.prompt),
                token_ids=one.put_out,
                kept=len(one.prompt) + len(one.put_out) - 1,
            )
            for lease, one in self._spoken.items()
        ]

    def read_by(self, written: Written) -> list[int]:
        """The tokens of a turn up to the end of what is written."""
        one = self._spoken[LeaseId(written.name)]
        return [*one.prompt, *one.put_out][: written.piece.start + written.piece.tokens]
