"""Passes inside a prefill engine's worker: called between its steps, in slices.

vLLM makes `PassWorker` a base of its own worker (`worker_extension_cls`); its methods are called
through `collective_rpc`, and carry packed wire structs. A pass is begun, driven slice by slice, and
ends by itself or is aborted; one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import msgspec
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from td_serve.engine.collective import Group, run_pass
from td_serve.engine.kept import Mirror, RoundStore, Run
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.restoring import RoundConnector
from td_serve.errors import ModelError
from td_serve.pic.rules import recovery
from td_serve.rows import Extent, Rows, Share, check, layout
from td_serve.types import (
    Canonical,
    MemberPass,
    PassResult,
    PassSpec,
    PassTokens,
    Piece,
    Rule,
    RuleName,
    pack,
    unpack,
)

T = TypeVar("T")

_CANONICAL = "canonical"
_HISTORY = "history"


class PassWorker:
    """What a worker answers. vLLM refuses names that its own worker has: ours begin with `td_`."""

    model_runner: Any
    td_passes: Passes | None = None

    def td_begin(self, packed: bytes) -> None:
        """Begin a pass. Raises ValueError when one is under way or the spec does not fit."""
        self._td_ready().begin(unpack(packed, PassSpec))

    @torch.inference_mode()
    def td_step(self, budget_s: float) -> bytes | None:
        """Go on for about `budget_s` seconds, one layer at least; the result when it is done."""
        result = self._td_ready().step(budget_s)
        return None if result is None else pack(result)

    @torch.inference_mode()
    def td_score(self, packed: bytes, prompts: list[list[int]], rules: list[str], last: int) -> Any:
        """See `Passes.score`; `rules` are those of `types.Rule`, as JSON."""
        named = [msgspec.json.decode(rule, type=Rule) for rule in rules]
        return self._td_ready().score(unpack(packed, PassSpec), prompts, named, last)

    def td_abort(self) -> None:
        """Give a pass up that is under way, if one is."""
        self._td_ready().abort()

    def td_mirrors(self) -> int:
        """For how many members something is kept that passes have made.

        Raises AssertionError when what is kept does not add up.
        """
        store = self._td_ready().store
        store.check_integrity()
        return len(store.mirrors)

    def td_release(self, names: list[str]) -> None:
        """Nobody will load these members' KV (again)."""
        self._td_ready().store.release(names)

    def _td_ready(self) -> Passes:
        if self.td_passes is None:
            runner = self.model_runner
            config = runner.vllm_config
            if config.parallel_config.world_size > 1 or runner.device.type != "cpu":
                raise ModelError("passes are computed on one CPU worker only, so far")
            model = VllmModel(runner.get_model())
            builder = runner.attn_groups[0][0].get_metadata_builder()
            attention = PagedAttention(model.attention, builder, runner.kv_caches[0])
            connector = _round_connector(get_kv_transfer_group())
            connector.parts = (model, attention)
            window = config.model_config.max_model_len
            self.td_passes = Passes(model, attention, connector.store, window)
        return self.td_passes


def _round_connector(connector: Any) -> RoundConnector:
    """Ours, by itself or among others."""
    parts = getattr(connector, "sub_connectors", [connector])
    return next(part for part in parts if isinstance(part, RoundConnector))


class Passes:
    """The passes of one engine, one after the other, and what they keep in `store`.

    Nothing is longer than `window` tokens, which is how many positions the model knows.
    """

    def __init__(
        self, model: VllmModel, attention: PagedAttention, store: RoundStore, window: int
    ) -> None:
        self.store = store
        self._window = window
        self._model = model
        self._attention = attention
        self._under_way: Generator[None, None, PassResult] | None = None

    def begin(self, spec: PassSpec) -> None:
        """See `PassWorker.td_begin`."""
        if self._under_way is not None:
            raise ValueError("a pass is under way")
        parts = [spec.canonical.token_ids, *(member.token_ids for member in spec.members)]
        if (longest := max(map(len, parts))) > self._window:
            raise ValueError(f"{longest} tokens, expected at most {self._window}")
        for member in spec.members:
            check(_extent(member, 0), len(spec.canonical.token_ids))
        self._under_way = self._play(spec)

    def step(self, budget_s: float) -> PassResult | None:
        """See `PassWorker.td_step`. Raises ValueError when no pass is under way."""
        if self._under_way is None:
            raise ValueError("no pass is under way")
        until = time.monotonic() + budget_s
        try:
            next(self._under_way)
            while time.monotonic() < until:
                next(self._under_way)
        except StopIteration as end:
            self._under_way = None
            result: PassResult = end.value
            return result
        except BaseException:
            self._under_way = None
            raise
        return None

    def abort(self) -> None:
        """See `PassWorker.td_abort`."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def score(
        self, spec: PassSpec, prompts: list[list[int]], rules: list[Rule], last: int
    ) -> list[dict[str, list[list[float]]]]:
        """How far each rule's answers are from those of full recomputation.

        Of the `last` tokens of every prompt, for each rule, by member and token: `kl`, the
        Kullback-Leibler divergence in nats, and `same`, 1 where the likeliest token is the same.
        Nothing is kept of it, and no history is used.
        """
        canonical = _finish(self._canonical(spec.canonical))
        wanted = self._logits(spec, prompts, canonical, Rule(name=RuleName.FULL), last)
        wanted = wanted.log_softmax(-1)
        found = []
        for rule in rules:
            other = self._logits(spec, prompts, canonical, rule, last).log_softmax(-1)
            kl = (wanted.exp() * (wanted - other)).sum(-1).view(len(prompts), last)
            same = (wanted.argmax(-1) == other.argmax(-1)).float().view(len(prompts), last)
            found.append({"kl": kl.tolist(), "same": same.tolist()})
        return found

    def _logits(
        self, spec: PassSpec, prompts: list[list[int]], canonical: Run, rule: Rule, last: int
    ) -> torch.Tensor:
        """Of each prompt's last tokens, [prompts * last, vocabulary]."""
        size = self._attention.block_size
        chosen = recovery(rule, size).chosen(spec.canonical.segments, canonical.kv.tokens)
        extents = [
            Extent(tokens=len(prompt), history=0, pieces=member.pieces)
            for prompt, member in zip(prompts, spec.members, strict=True)
        ]
        rows = layout(extents, chosen, size)
        wanted = [row for share in rows.shares for row in range(share.last - last, share.last)]
        group = Group(
            rows, _ids(rows, prompts), canonical.kv, [None] * len(prompts), logits_of=wanted
        )
        logits = _finish(run_pass(self._model, self._attention, group)).logits
        assert logits is not None, "logits were asked for"
        return logits

    def _play(self, spec: PassSpec) -> Generator[None, None, PassResult]:
        canonical = yield from self._canonical(spec.canonical)
        rule = recovery(spec.rule, self._attention.block_size)
        chosen = rule.chosen(spec.canonical.segments, canonical.kv.tokens)
        kept = [self._history(member) for member in spec.members]
        extents = [
            _extent(member, tokens) for member, (_, tokens) in zip(spec.members, kept, strict=True)
        ]
        rows = layout(extents, chosen, self._attention.block_size)
        group = Group(
            rows,
            _ids(rows, [member.token_ids for member in spec.members]),
            canonical.kv,
            [run.kv.part(0, tokens) for run, tokens in kept],
        )
        computed = yield from run_pass(self._model, self._attention, group)
        found: dict[str, PassTokens] = {}
        for member, extent, share, (history, tokens) in zip(
            spec.members, extents, rows.shares, kept, strict=True
        ):
            own = computed.kv.part(share.first, share.last)
            positions = rows.positions[share.first : share.last]
            mirror = Mirror(
                tokens=extent.tokens,
                canonical=canonical,
                cached=share.cached,
                sources=share.sources,
                history=history,
                history_tokens=tokens,
                positions=positions,
                own=own,
            )
            self.store.mirrors[member.request_id] = mirror
            self._keep_history(member, mirror)
            found[member.request_id] = _count(extent, share)
        return PassResult(members=found)

    def _canonical(self, wanted: Canonical) -> Generator[None, None, Run]:
        """The canonical sequence's KV: what is kept of it, and the rest computed."""
        run, common = self.store.find(_CANONICAL, wanted.key, wanted.token_ids)
        total = len(wanted.token_ids)
        if common == total:
            return run  # there may be more of it, from an earlier round
        before = run.kv.part(0, common)
        known = [Piece(start=0, tokens=common, source=0)] if common else []
        extent = Extent(tokens=total, history=0, pieces=known)
        rows = layout([extent], [False] * common, self._attention.block_size)
        group = Group(rows, wanted.token_ids[common:], before, [None], unrotated=True)
        computed = yield from run_pass(self._model, self._attention, group)
        made = Run(wanted.token_ids, before.followed_by(computed.kv))
        self.store.keep(_CANONICAL, wanted.key, made)
        return made

    def _history(self, member: MemberPass) -> tuple[Run, int]:
        """What is kept of what stands before the member's first piece, and how much of it fits."""
        private = member.token_ids[: _private(member)]
        return self.store.find(_HISTORY, member.history, private)

    def _keep_history(self, member: MemberPass, mirror: Mirror) -> None:
        """What stands before the first piece attends to nothing but itself: it is exact."""
        private = _private(member)
        new = private - mirror.history_tokens
        if new > 0:
            kv = mirror.history.kv.part(0, mirror.history_tokens).followed_by(
                mirror.own.part(0, new)
            )
            self.store.keep(_HISTORY, member.history, Run(member.token_ids[:private], kv))


def _finish(steps: Generator[None, None, T]) -> T:
    """Everything at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _extent(member: MemberPass, history: int) -> Extent:
    return Extent(tokens=len(member.token_ids), history=history, pieces=member.pieces)


def _private(member: MemberPass) -> int:
    """How many tokens stand before the member's first piece."""
    return member.pieces[0].start if member.pieces else len(member.token_ids)


def _ids(rows: Rows, prompts: list[list[int]]) -> list[int]:
    """The rows' tokens."""
    return [
        prompt[position]
        for prompt, share in zip(prompts, rows.shares, strict=True)
        for position in rows.positions[share.first : share.last]
    ]


def _count(extent: Extent, share: Share) -> PassTokens:
    shared = sum(piece.tokens for piece in extent.pieces)
    reused = len(share.cached)
    return PassTokens(
        prompt=extent.tokens,
        local=extent.history,
        reused=reused,
        selected=shared - reused,
        new=extent.tokens - extent.history - shared,
    )
