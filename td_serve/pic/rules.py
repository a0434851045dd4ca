"""The rule that a plan names."""

from __future__ import annotations

from td_serve.pic.base import Recovery, Settled
from td_serve.pic.first import FirstPages, FirstTokens
from td_serve.pic.full import Full
from td_serve.pic.hkvd import HighestDeviation
from td_serve.pic.none import Nothing
from td_serve.types import Rule, RuleName


def recovery(rule: Rule, page_tokens: int) -> Recovery:
    """The rule itself. `page_tokens` is the engine's block size."""

    def deviating(first: Settled | None) -> Recovery:
        return HighestDeviation(
            ratio=rule.ratio, left=rule.left, depth=rule.depth, run=rule.run, first=first
        )

    match rule.name:
        case RuleName.FULL:
            return Full()
        case RuleName.NONE:
            return Nothing()
        case RuleName.FIRST_K:
            return FirstTokens(rule.k)
        case RuleName.FIRST_PAGES:
            return FirstPages(rule.k, page_tokens)
        case RuleName.HKVD:
            return deviating(None)
        case RuleName.FIRST_K_HKVD:
            return deviating(FirstTokens(rule.k))
        case RuleName.FIRST_PAGES_HKVD:
            return deviating(FirstPages(rule.k, page_tokens))
