"""How far answers are from exact ones, computed where the model is: inside the engine's worker."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import msgspec
import torch

from td_serve.engine.collective import Group, run_pass
from td_serve.engine.kept import Run
from td_serve.engine.worker import Passes, PassWorker, row_ids
from td_serve.pic.rules import recovery
from td_serve.rows import Extent, layout
from td_serve.types import PassSpec, Rule, RuleName, unpack

T = TypeVar("T")


class Score(msgspec.Struct):
    """Of one rule, by member and token: the Kullback-Leibler divergence from full recomputation in
    nats, and 1 where the likeliest token is the same."""

    kl: list[list[float]]
    same: list[list[float]]


class ScoringWorker(PassWorker):
    """A worker that also scores rules."""

    def td_score(self, packed: bytes, prompts: list[list[int]], rules: bytes, last: int) -> bytes:
        """A `Score` for each of `rules`, of every prompt's `last` tokens; both as JSON lists.

        `prompts` are those of the spec's members, whole. No history is used.
        """
        with torch.inference_mode():
            named = msgspec.json.decode(rules, type=list[Rule])
            scores = _score(self._td_ready(), unpack(packed, PassSpec), prompts, named, last)
        return msgspec.json.encode(scores)


def _score(
    passes: Passes, spec: PassSpec, prompts: list[list[int]], rules: list[Rule], last: int
) -> list[Score]:
    canonical, _ = _finish(passes.canonical(spec.canonical))

    def logprobs(rule: Rule) -> torch.Tensor:
        return _logits(passes, spec, prompts, canonical, rule, last).log_softmax(-1)

    wanted = logprobs(Rule(name=RuleName.FULL))
    scores = []
    for rule in rules:
        found = logprobs(rule)
        kl = (wanted.exp() * (wanted - found)).sum(-1).view(len(prompts), last)
        same = (wanted.argmax(-1) == found.argmax(-1)).float().view(len(prompts), last)
        scores.append(Score(kl.tolist(), same.tolist()))
    return scores


def _logits(
    passes: Passes, spec: PassSpec, prompts: list[list[int]], canonical: Run, rule: Rule, last: int
) -> torch.Tensor:
    """Of each prompt's last tokens, [prompts * last, vocabulary]."""
    size = passes.attention.block_size
    chosen = recovery(rule, size).chosen(spec.canonical.segments, canonical.kv.tokens)
    extents = [
        Extent(tokens=len(prompt), history=0, pieces=member.pieces)
        for prompt, member in zip(prompts, spec.members, strict=True)
    ]
    rows = layout(extents, chosen, size)
    wanted = [row for share in rows.shares for row in range(share.last - last, share.last)]
    group = Group(
        rows, row_ids(rows, prompts), canonical.kv, [None] * len(prompts), logits_of=wanted
    )
    logits = _finish(run_pass(passes.model, passes.attention, group)).logits
    assert logits is not None, "logits were asked for"
    return logits


def _finish(steps: Generator[None, None, T]) -> T:
    """Everything at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
