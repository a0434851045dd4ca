"""Sessions whose rounds are not worth a pass, and for how many rounds no other is tried. Pure.

That a pass is not worth it shows only when some of it has been computed: the canonical sequence,
and a check layer. A session whose texts want most of it anew will want so next round, too.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_ROUNDS = 15
"""At most so many rounds go by until the next try."""
MOST_SESSIONS = 4096


class Sparing:
    """After the first pass for nothing one round goes by without, then three, seven, fifteen."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[str, int] = OrderedDict()
        """How many go by after a pass for nothing, by session."""
        self._left: dict[str, int] = {}

    def spares(self, session: str) -> bool:
        """Whether this round of a session is to go by. Mutates: it then has."""
        spares = self.will_spare(session)
        if spares:
            self._left[session] -= 1
        return spares

    def will_spare(self, session: str) -> bool:
        """Whether a session's next round is to go by."""
        return self._left.get(session, 0) > 0

    def learn(self, session: str, was_for_nothing: bool) -> None:
        """How a session's pass has ended."""
        before = self._rounds.pop(session, 0)
        self._left.pop(session, None)
        if was_for_nothing:
            self._rounds[session] = self._left[session] = min(2 * before + 1, MOST_ROUNDS)
            if len(self._rounds) > MOST_SESSIONS:
                oldest, _ = self._rounds.popitem(last=False)
                self._left.pop(oldest, None)
