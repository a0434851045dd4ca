"""How far answers are from exact ones, computed where the model is: inside the engine's worker."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import torch

from td_serve.engine.collective import run_pass
from td_serve.engine.kept import NOTHING, WRITTEN, History
from td_serve.engine.kv import KV
from td_serve.engine.parts import Part, batches, group_of
from td_serve.engine.worker import Passes, PassWorker
from td_serve.pic.base import Shared, mask
from td_serve.types import PassSpec, Rule, RuleName, unpack

T = TypeVar("T")

_MOST_ROWS = 8192


class Asked(msgspec.Struct, frozen=True):
    """A rule; or, `at_random`, as many of the shared tokens as it chooses, whichever."""

    rule: Rule
    at_random: bool = False


class Score(msgspec.Struct):
    """By member and token: the Kullback-Leibler divergence from full recomputation in nats, and 1
    where the likeliest token is the same. `chosen` is the share of shared tokens computed anew.

    Of `alone` members all are: the rule leaves them out.
    """

    kl: list[list[float]]
    same: list[list[float]]
    chosen: float
    alone: int


class ScoringWorker(PassWorker):
    """A worker that also scores rules, and has what was said once for many passes."""

    td_said: dict[str, History] | None = None

    def td_bring(self, names: list[str]) -> list[str]:
        """Have these turns' outputs taken over by the next pass. Gives those that never came."""
        store = self._td_ready().store
        self.td_said = self.td_said or {}
        for name in names:
            if store.has(WRITTEN, name):
                self.td_said[name] = store.get(WRITTEN, name)
            elif name in self.td_said:
                store.keep(WRITTEN, name, self.td_said[name])
        return [name for name in names if name not in self.td_said]

    def td_score(self, packed: bytes, prompts: list[list[int]], asked: bytes, last: int) -> bytes:
        """A `Score` for each of `asked`, of every prompt's `last` tokens; both as JSON lists.

        `prompts` are those of the spec's members, whole. No history is used.
        """
        with torch.inference_mode():
            named = msgspec.json.decode(asked, type=list[Asked])
            scores = _score(self._td_ready(), unpack(packed, PassSpec), prompts, named, last)
        return msgspec.json.encode(scores)


def _score(
    passes: Passes, spec: PassSpec, prompts: list[list[int]], asked: list[Asked], last: int
) -> list[Score]:
    canonical, _ = _finish(passes.canonical(spec.canonical, spec.written))
    shared = Shared(len(spec.canonical.token_ids), spec.canonical.segments)
    unsettled = [Part(member, NOTHING, 0, ()) for member in spec.members]

    def parts(one: Asked) -> list[Part]:
        chosen = _finish(passes.chooser.choose(one.rule, unsettled, canonical.kv, shared))
        return _at_random(chosen, shared) if one.at_random else chosen

    whole = {
        member.request_id: msgspec.structs.replace(member, token_ids=prompt)
        for member, prompt in zip(spec.members, prompts, strict=True)
    }
    places = {request_id: place for place, request_id in enumerate(whole)}
    exact = parts(Asked(Rule(name=RuleName.FULL)))

    def logprobs(chosen: list[Part]) -> torch.Tensor:
        """Of all members, [members, last, vocabulary]; exact of those that are not `chosen`."""
        read = [replace(part, member=whole[part.member.request_id]) for part in chosen]
        some = _logits(passes, read, canonical.kv, last).log_softmax(-1)
        if chosen is exact:
            return some
        every = wanted.clone()
        every[[places[part.member.request_id] for part in chosen]] = some
        return every

    wanted = logprobs(exact)
    scores = []
    for one in asked:
        chosen = parts(one)
        found = logprobs(chosen) if chosen else wanted
        kl = (wanted.exp() * (wanted - found)).sum(-1)
        same = (wanted.argmax(-1) == found.argmax(-1)).float()
        alone = len(spec.members) - len(chosen)
        share = (alone + _share_chosen(chosen) * len(chosen)) / len(spec.members)
        scores.append(Score(kl.tolist(), same.tolist(), share, alone))
    return scores


def _at_random(parts: Sequence[Part], shared: Shared) -> list[Part]:
    """One choice for all, as large as theirs is on average."""
    places = shared.places()
    count = round(_share_chosen(parts) * len(places))
    chosen = mask(shared, random.Random(count).sample(places, count))
    return [replace(part, chosen=chosen) for part in parts]


def _share_chosen(parts: Sequence[Part]) -> float:
    chosen = [part.chosen[place] for part in parts for place in Shared(0, part.spans).places()]
    return sum(chosen) / max(len(chosen), 1)


def _logits(passes: Passes, parts: Sequence[Part], canonical: KV, last: int) -> torch.Tensor:
    """Of each prompt's last tokens, [prompts, last, vocabulary]."""
    found = []
    for batch in batches(parts, _MOST_ROWS):
        group = group_of(batch, canonical, passes.attention.block_size)
        group.logits_of = [
            row for share in group.rows.shares for row in range(share.last - last, share.last)
        ]
        logits = _finish(run_pass(passes.model, passes.attention, group)).logits
        assert logits is not None, "logits were asked for"
        found.append(logits)
    return torch.cat(found).unflatten(0, (len(parts), last))


def _finish(steps: Generator[None, None, T]) -> T:
    """Everything at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
