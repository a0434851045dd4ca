"""Passes inside a prefill engine's worker: called between its steps, in slices.

vLLM makes `PassWorker` a base of its own worker (`worker_extension_cls`); its methods are called
through `collective_rpc`, and carry packed wire structs. A pass is begun, driven slice by slice, and
ends by itself or is aborted; one at a time.
"""

from __future__ import annotations

import bisect
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from td_serve.engine.choosing import Chooser
from td_serve.engine.collective import Group, run_pass
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.parts import Limits, Part, batches, group_of, private, row_ids
from td_serve.engine.restoring import RoundConnector
from td_serve.engine.spaces import space_of
from td_serve.errors import ModelError
from td_serve.pic.base import Shared
from td_serve.rows import Extent, Share, check, layout
from td_serve.rows import Rows as Layout
from td_serve.store.below import Below
from td_serve.store.families import NOTHING, Mirror, Rows, Run, continued
from td_serve.store.kv import KV, joined, spread
from td_serve.store.rounds import AHEAD, CANONICAL, HISTORY, WRITTEN, RoundStore
from td_serve.types import (
    Canonical,
    MemberPass,
    PassResult,
    PassSpec,
    PassTokens,
    Piece,
    SegmentKey,
    Span,
    Written,
    pack,
    unpack,
)

_SCRATCH = 0.25
"""Of the store's budget: room for one layer of the prompts that are computed at once."""


class PassWorker:
    """What a worker answers. vLLM refuses names that its own worker has: ours begin with `td_`."""

    model_runner: Any
    td_passes: Passes | None = None

    def td_why_no_passes(self) -> str | None:
        """Why no passes are made here; None if they are."""
        try:
            self._td_ready()
        except ModelError as error:
            return str(error)
        return None

    def td_begin(self, packed: bytes) -> None:
        """Begin a pass. Raises ValueError when one is under way or the spec does not fit."""
        self._td_ready().begin(unpack(packed, PassSpec))

    @torch.inference_mode()
    def td_step(self, budget_s: float) -> bytes | None:
        """Go on for about `budget_s` seconds, one layer at least; the result when it is done."""
        result = self._td_ready().step(budget_s)
        return None if result is None else pack(result)

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

    def td_spent(self) -> dict[str, float]:
        """Seconds by phase since this was asked last (`RoundStore.spent`)."""
        store = self._td_ready().store
        spent, store.spent = store.spent, {}
        return spent

    def td_written(self) -> list[str]:
        """The outputs of turns that have come, for passes to take over."""
        return self._td_ready().store.names(WRITTEN)

    def td_known(self, key: SegmentKey, token_ids: list[int]) -> int:
        """How many tokens of a canonical sequence are kept from its beginning on."""
        return self._td_ready().store.find(CANONICAL, key, token_ids)[1]

    def td_drop_written(self, names: list[str]) -> None:
        """No pass will take these outputs over."""
        for name in names:
            self._td_ready().store.drop(WRITTEN, name)

    def td_release(self, names: list[str]) -> None:
        """Nobody will load these members' KV (again)."""
        self._td_ready().store.release(names)

    def _td_ready(self) -> Passes:
        if self.td_passes is None:
            runner = self.model_runner
            config = runner.vllm_config
            parallel = config.parallel_config
            if parallel.world_size > parallel.tensor_parallel_size or runner.device.type != "cpu":
                raise ModelError("passes are computed on CPUs only, so far, and in one stage")
            model = VllmModel(runner.get_model())
            builder = runner.attn_groups[0][0].get_metadata_builder()
            attention = PagedAttention(model.attention, builder, runner.kv_caches[0])
            connector = _round_connector(get_kv_transfer_group())
            connector.parts = (model, attention)
            connector.store.below = _below(*connector.below, config, model)
            self.td_passes = Passes(
                model,
                attention,
                connector.store,
                window=config.model_config.max_model_len,
                most_rows=config.scheduler_config.max_num_batched_tokens,
            )
        return self.td_passes


def _below(urls: list[str], folder_bytes: int, config: Any, model: VllmModel) -> Below | None:
    """What a store keeps once more, where tiers below it are wanted and there."""
    if not urls:
        return None
    # LMCache brings numba, with which loaded vLLM starts no engine: it comes after that.
    from td_serve.store.tiers import open_tiers

    tier = open_tiers(urls, folder_bytes)
    return None if tier is None else Below(tier, space_of(config), model.kv_shape)


def _round_connector(connector: Any) -> RoundConnector:
    """Ours, by itself or among others."""
    parts = getattr(connector, "sub_connectors", [connector])
    return next(part for part in parts if isinstance(part, RoundConnector))


class Passes:
    """The passes of one engine, one after the other, and what they keep in `store`.

    Nothing is longer than `window` tokens, which is how many positions the model knows. Members'
    rows are computed in batches of `most_rows` at most, as many as the engine computes in a step
    (more only where one member alone has more), in scratch memory of a quarter of the store's.
    """

    def __init__(
        self,
        model: VllmModel,
        attention: PagedAttention,
        store: RoundStore,
        *,
        window: int,
        most_rows: int,
    ) -> None:
        self.store = store
        self.model = model
        self.attention = attention
        self._window = window
        self._most_rows = most_rows
        layer_bytes = model.kv_bytes // model.layers
        self._limits = Limits(most_rows, int(_SCRATCH * store.budget_bytes) // layer_bytes)
        self.chooser = Chooser(model, attention, self._limits)
        self._under_way: Generator[None, None, PassResult] | None = None

    def begin(self, spec: PassSpec) -> None:
        """See `PassWorker.td_begin`."""
        if self._under_way is not None:
            raise ValueError("a pass is under way")
        parts = [spec.canonical.token_ids, *(member.token_ids for member in spec.members)]
        if (longest := max(map(len, parts))) > self._window:
            raise ValueError(f"{longest} tokens, expected at most {self._window}")
        for member in spec.members:
            check(Part(member, NOTHING, 0, ()).extent, len(spec.canonical.token_ids))
        self._under_way = self._play(spec)

    def step(self, budget_s: float) -> PassResult | None:
        """See `PassWorker.td_step`. Raises ValueError when no pass is under way."""
        if self._under_way is None:
            raise ValueError("no pass is under way")
        until = time.monotonic() + budget_s
        try:
            next(self._under_way)
            while self._is_time_left(until):
                next(self._under_way)
        except StopIteration as end:
            self._under_way = None
            result: PassResult = end.value
            return result
        except BaseException:
            self._under_way = None
            raise
        return None

    def _is_time_left(self, until: float) -> bool:
        """Whether it is on every rank: they have clocks of their own, and go on together."""
        late = torch.tensor([float(time.monotonic() >= until)])
        return not self.model.summed(late).item()

    def abort(self) -> None:
        """See `PassWorker.td_abort`."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def _play(self, spec: PassSpec) -> Generator[None, None, PassResult]:
        unsettled, shared = self.unsettled(spec)
        self._check_room(unsettled)  # or all that comes before would be for nothing
        with self.store.spending("canonical"):
            canonical, computed = yield from self.canonical(
                spec.canonical, spec.written, is_guess=not unsettled
            )
        for one in spec.written:
            self.store.drop(WRITTEN, one.name)  # it is in the canonical sequence now
        if not unsettled:
            return PassResult(members={}, canonical=computed)
        with self.store.spending("choice"):
            parts = yield from self.chooser.choose(spec.rule, unsettled, canonical.kv, shared)
        self._check_room(parts)
        found: dict[str, PassTokens] = {}
        try:
            with self.store.spending("rows"):
                for batch in batches(parts, self._limits):
                    found |= yield from self._batch(batch, canonical, spec)
        except BaseException:
            self.store.release(found)  # nobody will be told of them
            raise
        return PassResult(members=found, canonical=computed)

    def _check_room(self, parts: Sequence[Part]) -> None:
        """Raises ValueError when these members' rows would be more than the store may hold beside
        what it keeps, with what others have not loaded yet."""
        rows = sum(part.rows() for part in parts)
        others, room = self.store.bytes_to_load, self.store.budget_bytes
        wanted = rows * self.model.kv_bytes
        if wanted + others > room:
            raise ValueError(
                f"{wanted} bytes for {rows} rows, and {others} for what is still to be loaded, "
                f"expected at most {room}"
            )

    def _batch(
        self, batch: Sequence[Part], canonical: Run, spec: PassSpec
    ) -> Generator[None, None, dict[str, PassTokens]]:
        """Compute some members' rows, and keep what comes of it; their tokens, by request."""
        group = group_of(batch, canonical.kv, self.attention.block_size)
        computed = yield from run_pass(self.model, self.attention, group)
        found: dict[str, PassTokens] = {}
        for part, share in zip(batch, group.rows.shares, strict=True):
            more = Mirror(
                token_ids=part.member.token_ids,
                rule=spec.rule,
                exact=private(part.member),
                canonical=canonical,
                cached=torch.tensor(share.cached, dtype=torch.int64),
                sources=torch.tensor(share.sources, dtype=torch.int64),
                history=NOTHING,
                history_tokens=0,
                own=_rows(group.rows, share, computed.kv, part),
            )
            mirror = continued(part.history, part.history_tokens, more)
            self.store.mirrors[part.member.request_id] = mirror
            if part.member.history:
                kept = mirror.coded(self.model, self.store.codecs)
                self.store.keep(HISTORY, part.member.history, kept)
            found[part.member.request_id] = _count(part, share)
        return found

    def canonical(
        self, wanted: Canonical, written: Sequence[Written] = (), *, is_guess: bool = False
    ) -> Generator[None, None, tuple[Run, int]]:
        """The canonical sequence's KV, and how many of its tokens had to be computed: neither what
        is kept of it nor what is `written`, if that has come.

        It is kept piece by piece: who gives up loses the last one only. A guess takes nothing away
        from what is kept: where it goes on otherwise, it is kept beside it, until the next round.
        """
        kept, alike_kept = self.store.find_run(CANONICAL, wanted.key, wanted.token_ids)
        guess, alike_guess = self.store.find_run(AHEAD, wanted.key, wanted.token_ids)
        common = max(alike_kept, alike_guess)
        run = guess if alike_guess > alike_kept else kept
        # What has nothing in common with the guess is there, too, but was not found.
        goes_on_otherwise = alike_kept < kept.kv.tokens or (
            not alike_kept and self.store.has(CANONICAL, wanted.key)
        )
        kind = AHEAD if is_guess and goes_on_otherwise else CANONICAL
        if not is_guess:
            self.store.drop(AHEAD, wanted.key)
            if run is guess:
                self.store.keep(CANONICAL, wanted.key, run)
        total = len(wanted.token_ids)
        computed = 0
        done = common
        while done < total:
            end = min(done + self._most_rows, total)
            token_ids = wanted.token_ids[:end]
            kv, rows = yield from self._go_on(token_ids, run.kv.part(0, done), written)
            run = Run(token_ids, kv, run.origin if done else uuid.uuid4().hex)
            self.store.keep(kind, wanted.key, run)
            computed += rows
            done = end
        return run, computed  # there may be more of it, from an earlier round

    def _go_on(
        self, token_ids: list[int], kv: KV, written: Sequence[Written]
    ) -> Generator[None, None, tuple[KV, int]]:
        """The KV of `token_ids`, of whose beginning it is known, keys before rotation; and how many
        rows were computed for it."""
        pieces = [Piece(start=0, tokens=kv.tokens, source=0)] if kv.tokens else []
        parts = [kv]
        end = known = kv.tokens
        for place, found in self._come(token_ids, written):
            first = max(place, end)  # what was known already stays as it is
            if (count := min(place + found.tokens, len(token_ids)) - first) > 0:
                pieces.append(Piece(start=first, tokens=count, source=known))
                parts.append(found.part(first - place, first - place + count))
                known += count
                end = first + count
        kv = joined(parts)
        extent = Extent(tokens=len(token_ids), history=0, pieces=pieces)
        rows = layout([extent], [[False] * known], self.attention.block_size)
        ids = row_ids(rows, [token_ids])
        group = Group(rows, ids, kv, [(NOTHING, 0)], unrotated=True)
        computed = yield from run_pass(self.model, self.attention, group)
        (share,) = rows.shares
        if not rows.positions or not share.cached:
            return (kv if share.cached else computed.kv), len(ids)
        places = torch.tensor(share.cached), torch.tensor(rows.positions)
        return spread([kv, computed.kv], places), len(ids)

    def _come(
        self, token_ids: Sequence[int], written: Sequence[Written]
    ) -> Iterator[tuple[int, KV]]:
        """What has come of what is written, and where it stands in `token_ids`."""
        for one in written:
            place = one.piece.source
            wanted = token_ids[place : place + one.piece.tokens]
            run, common = self.store.find_run(WRITTEN, one.name, wanted)
            if common:
                yield place, run.kv.part(0, common)

    def unsettled(self, spec: PassSpec) -> tuple[list[Part], Shared]:
        """A pass's members with what is kept of how their prompts begin, none of them with a choice
        yet; and what a rule has to choose from."""
        parts = [self._part(member, spec) for member in spec.members]
        still = _still_shared(spec.canonical, parts)
        known = _tokens(spec.canonical.segments) - _tokens(still)
        own = [part.behind for part in parts if part.pieces]
        behind = sum(own) / max(1, len(own))
        return parts, Shared(len(spec.canonical.token_ids), still, known=known, behind=behind)

    def _part(self, member: MemberPass, spec: PassSpec) -> Part:
        """A member with what is kept of how its prompt begins, and can be used; of the canonical
        sequence none is chosen."""
        token_ids = spec.canonical.token_ids
        history, common = self.store.find(HISTORY, member.history, member.token_ids)
        if isinstance(history, Mirror) and (
            history.rule != spec.rule or not history.begins_in(token_ids, common)
        ):
            common = min(common, history.exact)
        return Part(member, history, common, chosen=[False] * len(token_ids))


def _rows(rows: Layout, share: Share, kv: KV, part: Part) -> tuple[Rows, ...]:
    """A member's part of what a group has computed, in memory of their own: what nobody shares, and
    what was chosen of what is shared."""
    positions = torch.tensor(rows.positions[share.first : share.last], dtype=torch.int64)
    sources = torch.full((len(part.member.token_ids),), -1)
    for piece in part.pieces:
        sources[piece.start : piece.start + piece.tokens] = torch.arange(
            piece.source, piece.source + piece.tokens
        )
    sources = sources[positions]
    (private,), (diffs,) = (
        (sources < 0).nonzero(as_tuple=True),
        (sources >= 0).nonzero(as_tuple=True),
    )
    return (
        Rows(positions[private], kv.rows(private + share.first)),
        Rows(positions[diffs], kv.rows(diffs + share.first), sources[diffs]),
    )


def _still_shared(canonical: Canonical, parts: Sequence[Part]) -> list[Span]:
    """The canonical sequence's segments, each from where on somebody still takes it over."""
    starts = [one.start for one in canonical.segments]
    first: dict[int, int] = {}
    for span in {(span.start, span.tokens) for part in parts for span in part.spans}:
        start, end = span[0], span[0] + span[1]
        number = max(0, bisect.bisect_right(starts, start) - 1)
        while number < len(starts) and starts[number] < end:
            here = max(start, starts[number])
            if here < starts[number] + canonical.segments[number].tokens:
                first[number] = min(here, first.get(number, here))
            number += 1
    return [
        Span(start=at, tokens=starts[number] + canonical.segments[number].tokens - at)
        for number, at in sorted(first.items())
    ]


def _tokens(spans: Sequence[Span]) -> int:
    return sum(span.tokens for span in spans)


def _count(part: Part, share: Share) -> PassTokens:
    extent = part.extent
    shared = sum(piece.tokens for piece in extent.pieces)
    reused = len(share.cached)
    return PassTokens(
        prompt=extent.tokens,
        local=extent.history,
        reused=reused,
        selected=shared - reused,
        new=extent.tokens - extent.history - shared,
        left=part.left,
    )
