"""What a recovery rule decides.

KV that is taken from the canonical sequence was computed after other tokens than a member's own. A
rule names the shared tokens that are computed anew, where they stand, to recover what was lost.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from td_serve.types import Span


@dataclass(frozen=True)
class Shared:
    """What a rule chooses from: `segments` of a canonical sequence of `tokens` tokens, in order, or
    their ends. What stands before them is nobody's; `known` more tokens are shared, and in all
    members' histories already. `behind` the first of it stand so many tokens of a member's own, on
    average: they are computed with it in view.

    `deviations` says of each token how far its keys, in a member's own context, are from the
    canonical ones at the rule's check layer: the squared distance over those' squared length. Empty
    for a rule without a check layer. `scores`, for a rule that weighs, are deviations times the
    square root of how much what is asked attends to a token, of the mean of all: how much a token
    matters.
    """

    tokens: int
    segments: Sequence[Span]
    deviations: Sequence[float] = ()
    scores: Sequence[float] = ()
    known: int = 0
    behind: float = 0.0

    def places(self) -> list[int]:
        """Every shared token's place in the canonical sequence, in order."""
        return [place for span in self.segments for place in range(span.start, _end(span))]


def left(shared: Shared, chosen: Sequence[bool]) -> float | None:
    """How far shared tokens deviate that are not chosen, averaged over all; None if not known."""
    places = shared.places()
    if not places or not shared.deviations:
        return None
    return sum(shared.deviations[at] for at in places if not chosen[at]) / len(places)


class Recovery(Protocol):
    """A rule. Pure: the same `Shared` gives the same choice, on every rank."""

    def check_layer(self, layers: int) -> int | None:
        """At which of a model's layers deviations are looked at; None when they are not."""
        ...

    def chosen(self, shared: Shared) -> list[bool] | None:
        """Of each of the canonical sequence's tokens: whether members compute it.

        None where that would be more than the rule allows: then nothing shall be taken over.
        """
        ...


class Settled(abc.ABC):
    """A rule that looks at nothing that is computed, and always chooses."""

    def check_layer(self, layers: int) -> int | None:
        return None

    @abc.abstractmethod
    def chosen(self, shared: Shared) -> list[bool]:
        """See `Recovery`."""


def mask(shared: Shared, places: Sequence[int]) -> list[bool]:
    """True at `places` alone."""
    made = [False] * shared.tokens
    for place in places:
        made[place] = True
    return made


def _end(span: Span) -> int:
    return span.start + span.tokens
