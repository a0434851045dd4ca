"""The rules that the reuse bench plays, by the names by which they are asked for."""

from __future__ import annotations

import enum

from td_serve.config import ReuseSettings
from td_serve.types import Rule, RuleName


class Preset(enum.Enum):
    """`td` is what a deployment does by default; the others are named for their rules, `weighed` is
    `hkvd` with what is asked in mind.

    `author` is `td` on what was said as it was decoded; `paper`, that of TokenDance, section 4.2,
    too: 15 % of the tokens, chosen at layer 1 for each member by itself.
    """

    TD = "td"
    NONE = "none"
    FIRST_K = "first_k"
    FIRST_PAGES = "first_pages"
    HKVD = "hkvd"
    WEIGHED = "weighed"
    FIRST_K_HKVD = "first_k+hkvd"
    AUTHOR = "author"
    PAPER = "paper"
    FULL = "full"

    @property
    def rule(self) -> Rule:
        return _RULES[self]

    @property
    def reads_authors(self) -> bool:
        """Whether what was said is taken as it was decoded."""
        return self in (Preset.AUTHOR, Preset.PAPER)

    @property
    def chooses(self) -> bool:
        """Whether it computes some of the shared tokens, and not all: a choice like others."""
        return self.rule.name not in (RuleName.NONE, RuleName.FULL)


_RULES = {
    Preset.TD: ReuseSettings().as_rule(),
    Preset.NONE: ReuseSettings(rule="none").as_rule(),
    Preset.FIRST_K: ReuseSettings(rule="first_k", k=4).as_rule(),
    Preset.FIRST_PAGES: ReuseSettings(rule="first_pages", k=2).as_rule(),
    Preset.HKVD: ReuseSettings(rule="hkvd", ratio=0.15, left=0.0, weighed=False).as_rule(),
    Preset.WEIGHED: ReuseSettings(rule="hkvd", ratio=0.15, left=0.0).as_rule(),
    Preset.FIRST_K_HKVD: ReuseSettings(
        rule="first_k+hkvd", k=2, ratio=0.15, left=0.0, weighed=False
    ).as_rule(),
    Preset.AUTHOR: ReuseSettings().as_rule(),
    Preset.PAPER: ReuseSettings(
        rule="hkvd", ratio=0.15, left=0.0, depth=0.0, own=True, weighed=False
    ).as_rule(),
    Preset.FULL: ReuseSettings(rule="full").as_rule(),
}
