"""How far a rule's answers are from exact ones: over all members and rounds, mean and worst."""

from __future__ import annotations

import statistics

import msgspec

from td_serve.bench.presets import Preset

SCORED = 32
"""Tokens of every answer that fidelity is measured over."""


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """A rule against full recomputation, or as many tokens chosen `at_random`.

    `chosen` is the share of shared tokens that are computed anew, `alone` of how many members all:
    the rule left them out. Divergences are in nats, at the
    first token of an answer and over 32; `top1_32` says how often the likeliest token is the same,
    `match_32` with how many tokens both greedy answers begin alike (None where none was decoded).
    Worst is a member's.
    """

    preset: Preset
    at_random: bool
    chosen: float
    alone: int = 0
    kl0_mean: float
    kl0_max: float
    kl32_mean: float
    kl32_max: float
    top1_32: float
    top1_32_min: float
    match_32: float | None = None
    match_32_min: int | None = None


class Measured(msgspec.Struct):
    """Of one rule, by member: divergence and agreement at each token; greedy match lengths."""

    kl: list[list[float]] = msgspec.field(default_factory=list)
    same: list[list[float]] = msgspec.field(default_factory=list)
    chosen: list[float] = msgspec.field(default_factory=list)
    alone: int = 0
    match: list[int] = msgspec.field(default_factory=list)


def fidelity(preset: Preset, at_random: bool, found: Measured) -> Fidelity:
    """The figures of one rule."""
    first = [tokens[0] for tokens in found.kl]
    means = [statistics.mean(tokens) for tokens in found.kl]
    agree = [statistics.mean(tokens) for tokens in found.same]
    return Fidelity(
        preset=preset,
        at_random=at_random,
        chosen=round(statistics.mean(found.chosen), 4),
        alone=found.alone,
        kl0_mean=round(statistics.mean(first), 5),
        kl0_max=round(max(first), 5),
        kl32_mean=round(statistics.mean(means), 5),
        kl32_max=round(max(means), 5),
        top1_32=round(statistics.mean(agree), 4),
        top1_32_min=round(min(agree), 4),
        match_32=round(statistics.mean(found.match), 2) if found.match else None,
        match_32_min=min(found.match) if found.match else None,
    )
