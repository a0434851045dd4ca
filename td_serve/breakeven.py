"""From how many tokens on reading KV back is quicker than computing it: as measured. Pure.

Computing n tokens takes n / (prefill's rate). Reading them takes what asking for the hold takes,
whatever n, and n / (the transfer's rate). Both rates and the asking are measured as requests go by
and fade with age (exponentially, a weight for each new sample), so that a network that slows down
or a prefill engine that is busy moves the threshold.
"""

from __future__ import annotations

import math

WEIGHT = 0.2
FORGET = 0.01
"""What a prefill that computes takes off the measured time of a read."""
LEAST_TOKENS = 16
"""Of fewer tokens, how long they took says nothing about a rate."""


class _Average:
    """An exponentially weighted mean; None before the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + WEIGHT * (sample - self.value)


class BreakEven:
    """The threshold in tokens; `before` until all three have been measured."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._compute_s = _Average()  # a token
        self._read_s = _Average()  # a token
        self._ask_s = _Average()  # a read

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill computed `tokens` in `seconds`, waiting included."""
        if tokens >= LEAST_TOKENS:
            self._compute_s.add(seconds / tokens)
            if self._read_s.value is not None:
                # Where nothing is read any more, nothing new is learnt: trust the old less and
                # less, until a read is tried again.
                self._read_s.value *= 1 - FORGET

    def asked(self, seconds: float) -> None:
        """Asking for a hold took so long."""
        self._ask_s.add(seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """A read brought `tokens` in `seconds`."""
        if tokens >= LEAST_TOKENS:
            self._read_s.add(seconds / tokens)

    @property
    def tokens(self) -> int | None:
        """Fewer than these are computed; None: reading never pays."""
        compute, read, ask = self._compute_s.value, self._read_s.value, self._ask_s.value
        if compute is None or read is None or ask is None:
            return self._before
        if compute <= read:
            return None
        return max(1, math.ceil(ask / (compute - read)))
