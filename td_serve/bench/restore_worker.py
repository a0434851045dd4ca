"""How long what a pass has made takes to come into an engine's pages, measured in its worker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import torch

from td_serve.bench import fused
from td_serve.bench.scoring import ScoringWorker
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.restoring import restore
from td_serve.store.below import Below, Tier
from td_serve.store.families import Mirror
from td_serve.store.rounds import CANONICAL, HISTORY, RoundStore

FUSED, WRITTEN, DENSE, BELOW = "fused", "written", "dense", "below"
"""Straight into the pages by our kernels; part by part by the engine's own; by way of a dense copy
of the mirror, as a store without families would give it; and as WRITTEN, after it has been read
from a tier below the store."""

_FOLDER_BYTES = 2**40

_Way = Callable[
    [VllmModel, PagedAttention, Sequence[torch.Tensor], Mirror, Sequence[int], int, int], None
]


class Restored(msgspec.Struct):
    """Seconds for all mirrors, by way, one for each repeat; how many bytes came into pages; and how
    far what any two ways have written is apart at most, of the largest number."""

    seconds: dict[str, list[float]]
    bytes: int
    apart: float


class BenchWorker(ScoringWorker):
    """A worker that also measures restores."""

    def td_restore(self, requests: list[str], repeats: int) -> bytes:
        """A `Restored`, as JSON, of the mirrors that these requests are to load. Raises ValueError
        where they cannot be restored by every way."""
        passes = self._td_ready()
        model, attention = passes.model, passes.attention
        mirrors = [passes.store.mirrors[name] for name in requests]
        if wrong := [one for one in mirrors if not fused.fits(one, attention)]:
            raise ValueError(f"{len(wrong)} mirrors cannot be restored in one pass")
        ways: dict[str, _Way] = {FUSED: fused.restore, WRITTEN: restore, DENSE: _dense}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        apart = 0.0
        longest = max(len(one.token_ids) for one in mirrors)
        count = -(-longest // attention.block_size)
        # As blocks of a pool come: in no order.
        blocks = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        pages = [attention.memory(count) for _ in range(model.layers)]
        with torch.inference_mode():
            for mirror in mirrors:
                apart = max(apart, _apart(model, attention, mirror, blocks, count, ways))
            for number in range(repeats + 1):
                for way, bring in ways.items():
                    began = time.perf_counter()
                    for mirror in mirrors:
                        bring(model, attention, pages, mirror, blocks, 0, len(mirror.token_ids))
                    if number:  # the first one warms up
                        seconds[way].append(time.perf_counter() - began)
        tokens = sum(len(one.token_ids) for one in mirrors)
        return msgspec.json.encode(Restored(seconds, tokens * model.kv_bytes, apart))

    def td_restore_below(self, requests: list[str], url: str, repeats: int) -> list[float]:
        """Seconds for each repeat to find these mirrors at `url`, where they are put first, by a
        store that has nothing, and to bring them into pages. Raises ValueError when nothing can be
        put there."""
        # LMCache brings numba, with which loaded vLLM starts no engine: it comes after that.
        from td_serve.store.tiers import open_tiers

        passes = self._td_ready()
        model, attention = passes.model, passes.attention
        if (tier := open_tiers([url], _FOLDER_BYTES)) is None:
            raise ValueError(f"{url}: nothing can be put there")
        space = uuid.uuid4().hex
        mirrors = {name: passes.store.mirrors[name] for name in requests}
        store = _store_on(tier, space, model)
        for name, mirror in mirrors.items():
            store.keep(CANONICAL, mirror.canonical.origin, mirror.canonical)
            store.keep(HISTORY, name, mirror)
        store.settle()
        longest = max(len(one.token_ids) for one in mirrors.values())
        blocks = list(range(-(-longest // attention.block_size)))
        pages = [attention.memory(len(blocks)) for _ in range(model.layers)]
        seconds = []
        with torch.inference_mode():
            for _ in range(repeats):
                began = time.perf_counter()
                store = _store_on(tier, space, model)
                for name, mirror in mirrors.items():
                    found, common = store.find(HISTORY, name, mirror.token_ids)
                    if common < len(mirror.token_ids) or not isinstance(found, Mirror):
                        raise ValueError(f"{url}: what was put there is not found")
                    restore(model, attention, pages, found, blocks, 0, common)
                seconds.append(time.perf_counter() - began)
        tier.close()
        return seconds


def _store_on(tier: Tier, space: str, model: VllmModel) -> RoundStore:
    store = RoundStore(2**40)
    store.below = Below(tier, space, model.kv_shape)
    return store


def _apart(
    model: VllmModel,
    attention: PagedAttention,
    mirror: Mirror,
    blocks: Sequence[int],
    count: int,
    ways: dict[str, _Way],
) -> float:
    """How far two ways are apart at most in what they write; NaN where one leaves a gap."""
    found = []
    for bring in ways.values():
        pages = [attention.memory(count).fill_(float("nan")) for _ in range(model.layers)]
        bring(model, attention, pages, mirror, blocks, 0, len(mirror.token_ids))
        read = [attention.read(one, blocks, 0, len(mirror.token_ids)) for one in pages]
        found.append(torch.stack([torch.cat(layer) for layer in read]))
    first, *others = found
    far = torch.stack([(first.float() - one.float()).abs().max() for one in others]).max()
    return float(far / first.float().abs().max())


def _dense(
    model: VllmModel,
    attention: PagedAttention,
    pages: Sequence[torch.Tensor],
    mirror: Mirror,
    blocks: Sequence[int],
    first: int,
    last: int,
) -> None:
    """The mirror put together in memory of its own, layer by layer, then written into the pages."""
    slots = attention.slots(torch.tensor(blocks), torch.arange(first, last))
    for layer, memory in enumerate(pages):
        width = mirror.canonical.kv.keys[layer].shape[1]
        made = [memory.new_empty(last - first, width) for _ in range(2)]
        for places, keys, values in mirror.parts(model, layer, first, last):
            made[0][places - first], made[1][places - first] = keys, values
        attention.write(layer, memory, made[0], made[1], slots)
