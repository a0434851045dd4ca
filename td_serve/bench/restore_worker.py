"""How long what a pass has made takes to come into an engine's pages, measured in its worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from td_serve.bench import fused
from td_serve.bench.scoring import ScoringWorker
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.engine.restoring import restore
from td_serve.store.families import Mirror

FUSED, WRITTEN, DENSE = "fused", "written", "dense"
"""Straight into the pages by our kernels; part by part by the engine's own; and by way of a dense
copy of the mirror, as a store without families would give it."""

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
