"""How far answers are from exact ones, computed where the model is: inside the engine's worker."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import torch

from td_serve.engine.collective import run_pass
from td_serve.engine.model import LayeredModel
from td_serve.engine.parts import Limits, Part, batches, group_of
from td_serve.engine.worker import Passes, PassWorker
from td_serve.pic.base import Shared, mask
from td_serve.store.codecs import LOSSLESS, Codec, Codecs
from td_serve.store.families import NOTHING, History, Mirror
from td_serve.store.kv import KV
from td_serve.store.rounds import HISTORY, WRITTEN
from td_serve.store.sizes import family_size
from td_serve.types import MemberPass, PassSpec, RequestId, Rule, unpack

T = TypeVar("T")

_LIMITS = Limits(rows=8192, tokens=2**17)


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
    td_exact: _Exact | None = None
    td_lossless: list[torch.Tensor] | None = None

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

        `prompts` are those of the spec's members, whole. Members' prompts begin with what a pass by
        the spec's rule would find of them.
        """
        spec = unpack(packed, PassSpec)
        named = msgspec.json.decode(asked, type=list[Asked])
        passes = self._td_ready()
        with torch.inference_mode():
            if self.td_exact is None or self.td_exact.prompts != prompts:
                # One for all presets: it is most of the work.
                self.td_exact = _Exact(prompts, _exact(passes, prompts, last))
            scores = _score(passes, spec, self.td_exact, named, last)
        return msgspec.json.encode(scores)

    def td_keep_by(self, diffs: str, private: str) -> None:
        """Have histories kept by these codecs from now on."""
        self._td_ready().store.codecs = Codecs(Codec(diffs), Codec(private))

    def td_sizes(self, names: list[str]) -> bytes:
        """A `FamilySize` of these members' histories, as JSON, those that are mirrors."""
        passes = self._td_ready()
        kept = [passes.store.get(HISTORY, name) for name in names]
        mirrors = [one for one in kept if isinstance(one, Mirror)]
        return msgspec.json.encode(family_size(mirrors, passes.model.kv_bytes))

    def td_kept_exactly(self, names: dict[str, str]) -> bool:
        """Whether what has been made for these requests is what is kept under these names."""
        passes = self._td_ready()
        store, model = passes.store, passes.model
        return all(
            _same(model, store.mirrors[request], store.get(HISTORY, name))
            for request, name in names.items()
            if request in store.mirrors
        )

    def td_added(self, packed: bytes, prompts: list[list[int]], last: int) -> list[list[float]]:
        """By member and token, how far what follows on its prompt's last tokens is from what did
        when this was last asked with lossless codecs: nats, behind histories as they are kept."""
        passes, spec = self._td_ready(), unpack(packed, PassSpec)
        with torch.inference_mode():
            found = list(_rule(passes, spec, prompts, last))
        if passes.store.codecs == LOSSLESS:
            self.td_lossless = found
        assert self.td_lossless is not None, "lossless comes first"
        pairs = zip(self.td_lossless, found, strict=True)
        return [(was.exp() * (was - now)).sum(-1).tolist() for was, now in pairs]


@dataclass(frozen=True)
class _Exact:
    """Whole prompts, and the log-probabilities of what follows on their last tokens when everything
    is computed, [prompts, last, vocabulary]."""

    prompts: list[list[int]]
    logprobs: torch.Tensor


def _exact(passes: Passes, prompts: list[list[int]], last: int) -> torch.Tensor:
    members = [
        MemberPass(request_id=RequestId(str(place)), history="", token_ids=prompt, pieces=[])
        for place, prompt in enumerate(prompts)
    ]
    parts = [Part(member, NOTHING, 0, ()) for member in members]
    return _logits(passes, parts, KV(), last).log_softmax(-1)


def _score(
    passes: Passes, spec: PassSpec, exact: _Exact, asked: list[Asked], last: int
) -> list[Score]:
    unsettled, shared = passes.unsettled(spec)
    canonical, _ = _finish(passes.canonical(spec.canonical, spec.written))
    prompts = dict(zip((one.request_id for one in spec.members), exact.prompts, strict=True))
    places = {request_id: place for place, request_id in enumerate(prompts)}
    wanted = exact.logprobs

    def logprobs(chosen: list[Part]) -> torch.Tensor:
        """Of all members; exact of those that are not `chosen`."""
        every = wanted.clone()
        if chosen:
            read = [_whole(part, prompts[part.member.request_id]) for part in chosen]
            found = _logits(passes, read, canonical.kv, last).log_softmax(-1)
            every[[places[part.member.request_id] for part in chosen]] = found
        return every

    scores = []
    for one in asked:
        chosen = _finish(passes.chooser.choose(one.rule, unsettled, canonical.kv, shared))
        if one.at_random:
            chosen = _at_random(chosen, shared)
        found = logprobs(chosen)
        kl = (wanted.exp() * (wanted - found)).sum(-1)
        same = (wanted.argmax(-1) == found.argmax(-1)).float()
        alone = len(spec.members) - len(chosen)
        share = (alone + _share_chosen(chosen) * len(chosen)) / len(spec.members)
        scores.append(Score(kl.tolist(), same.tolist(), share, alone))
    return scores


def _rule(
    passes: Passes, spec: PassSpec, prompts: list[list[int]], last: int
) -> Iterator[torch.Tensor]:
    """Of each member, log-probabilities by the spec's rule, [last, vocabulary]."""
    unsettled, shared = passes.unsettled(spec)
    canonical, _ = _finish(passes.canonical(spec.canonical, spec.written))
    chosen = _finish(passes.chooser.choose(spec.rule, unsettled, canonical.kv, shared))
    whole = dict(zip((one.request_id for one in spec.members), prompts, strict=True))
    for part in chosen:
        read = _whole(part, whole[part.member.request_id])
        yield from _logits(passes, [read], canonical.kv, last).log_softmax(-1)


def _same(model: LayeredModel, made: History, kept: History) -> bool:
    """Whether one history begins as the other is, bit for bit, in all layers."""
    tokens = len(made.token_ids)
    if kept.token_ids[:tokens] != made.token_ids:
        return False
    return all(
        torch.equal(one, other)
        for layer in range(model.layers)
        for one, other in zip(
            _dense(model, made, layer, tokens), _dense(model, kept, layer, tokens), strict=True
        )
    )


def _dense(model: LayeredModel, history: History, layer: int, tokens: int) -> list[torch.Tensor]:
    """A layer's keys and values of a history's first tokens, all together."""
    found = list(history.parts(model, layer, 0, tokens))
    made = [torch.full((tokens, found[0].keys.shape[1]), torch.nan) for _ in range(2)]
    for positions, keys, values in found:
        made[0][positions], made[1][positions] = keys.float(), values.float()
    return [plane.view(torch.int32) for plane in made]


def _whole(part: Part, prompt: list[int]) -> Part:
    """The part with all of its member's prompt, and what has been answered."""
    return replace(part, member=msgspec.structs.replace(part.member, token_ids=prompt))


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
    for batch in batches(parts, _LIMITS):
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
