"""A mirror into a request's pages in one pass over each layer, without a dense copy of it
(TokenDance, section 4.4 and algorithm 1), by the kernels of `td_kernels`.

Engines do not restore so yet: passes are made on CPUs alone, where vLLM's own kernel writes pages
more quickly (`bench restore` measures both).

What is the same in all layers, where each token goes and how far its key is turned, is worked out
once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from td_kernels.planes import Planes, Turn
from td_kernels.restore_pipeline import restore_layers
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.store.families import Mirror, Run
from td_serve.store.kv import KV


@dataclass(frozen=True)
class _Part:
    """Rows of `kv` that go to `slots`; of a canonical sequence, whose keys are turned to
    `positions`."""

    kv: KV
    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor | None = None


def fits(mirror: Mirror, attention: PagedAttention) -> bool:
    """Whether a mirror can be restored so: nothing of it is coded, and what a token has in a page
    stands at equal distances."""
    plain = isinstance(mirror.history, Run) and all(isinstance(one.kv, KV) for one in mirror.own)
    return plain and attention.is_strided


def restore(
    model: VllmModel,
    attention: PagedAttention,
    pages: Sequence[torch.Tensor],
    mirror: Mirror,
    blocks: Sequence[int],
    first: int,
    last: int,
) -> None:
    """Write tokens [first, last) of a mirror, which stands in `blocks`, into all layers' pages."""
    planes = [attention.planes(memory) for memory in pages]
    shape = (-1, *planes[0].keys.shape[2:])
    nothing = Planes(*(one.new_empty(0, *shape[1:]) for one in planes[0]))
    turning = model.turning
    for part in _parts(mirror, attention, blocks, first, last):
        masters = [
            Planes(keys.view(shape), values.view(shape))
            for keys, values in zip(part.kv.keys, part.kv.values, strict=True)
        ]
        turn = None
        if part.positions is not None:
            turn = Turn(turning.table, part.positions, neox=turning.is_neox)
        patches = [nothing] * len(planes)
        restore_layers(masters, patches, part.rows, part.slots, planes, turn)


def _parts(
    mirror: Mirror, attention: PagedAttention, blocks: Sequence[int], first: int, last: int
) -> list[_Part]:
    slots = functools.partial(attention.slots, torch.tensor(blocks))
    parts = []
    assert isinstance(mirror.history, Run), "a coded history is put together first"
    if first < (end := min(last, mirror.history_tokens)):
        here = torch.arange(first, end)
        parts.append(_Part(mirror.history.kv, here, slots(here)))
    some = (mirror.cached >= first) & (mirror.cached < last)
    if len(positions := mirror.cached[some]):
        parts.append(_Part(mirror.canonical.kv, mirror.sources[some], slots(positions), positions))
    for own in mirror.own:
        (rows,) = ((own.positions >= first) & (own.positions < last)).nonzero(as_tuple=True)
        if len(rows):
            assert isinstance(own.kv, KV), "coded rows are put together first"
            parts.append(_Part(own.kv, rows, slots(own.positions[rows])))
    return parts
