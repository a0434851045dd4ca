"""The collective pass: a group's rows through all layers in lock step (TokenDance, section 4.2).

What stands in the canonical sequence is taken from there, turned to each member's own positions;
what is a member's history is taken as it was; the rest is computed for all members at once, each
row with the attention that an ordinary prefill would give it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from td_serve.engine.model import LayeredModel
from td_serve.engine.pages import PagedAttention
from td_serve.rows import Rows, Share
from td_serve.store.families import History
from td_serve.store.kv import KV


@dataclass
class Group:
    """What a pass computes. `ids` are the rows' tokens; `histories` each member's, and how many of
    its tokens count.

    `canonical` holds keys before rotation; histories and everything computed hold them rotated,
    unless the pass is `unrotated`: it then computes a canonical sequence. With `until`, it computes
    that one layer's queries, keys and values alone.
    """

    rows: Rows
    ids: list[int]
    canonical: KV
    histories: Sequence[tuple[History, int]]
    unrotated: bool = False
    until: int | None = None
    logits_of: list[int] = field(default_factory=list)
    """Of these rows logits are wanted too."""


@dataclass
class Computed:
    """The rows' KV, and the logits that were asked for.

    Of a pass `until` a layer that layer's alone, and `queries`, too; all of it before rotation.
    """

    kv: KV
    logits: torch.Tensor | None = None
    queries: torch.Tensor | None = None


class _Sources:
    """Where the KV of what is not computed comes from, and where it goes, in each layer alike."""

    def __init__(self, group: Group, model: LayeredModel) -> None:
        rows = group.rows
        self._model = model
        self._canonical = group.canonical
        self._sources = torch.tensor(_joined([share.sources for share in rows.shares]))
        self._positions = torch.tensor(_joined([share.cached for share in rows.shares]))
        self._slots = torch.tensor(
            _joined([_slots(share, rows.block_size) for share in rows.shares])
        )
        self._histories = [
            (history, tokens, share.block * rows.block_size)
            for (history, tokens), share in zip(group.histories, rows.shares, strict=True)
        ]

    def write(self, layer: int, attention: PagedAttention, memory: torch.Tensor) -> None:
        """Put this layer's into `memory`."""
        if len(self._sources):
            keys = self._canonical.keys[layer].index_select(0, self._sources)
            values = self._canonical.values[layer].index_select(0, self._sources)
            keys, _ = self._model.rotate(layer, self._positions, keys, None)
            attention.write(layer, memory, keys, values, self._slots)
        for history, tokens, base in self._histories:
            for positions, keys, values in history.parts(self._model, layer, 0, tokens):
                attention.write(layer, memory, keys, values, positions + base)


def run_pass(
    model: LayeredModel, attention: PagedAttention, group: Group
) -> Generator[None, None, Computed]:
    """Compute a group's rows. Yields between layers, so that others may work meanwhile."""
    rows = group.rows
    if not rows.positions:
        return Computed(group.canonical.part(0, 0))
    positions = torch.tensor(rows.positions)
    slots = torch.tensor(rows.slots)
    sources = _Sources(group, model)
    plan = attention.plan(rows)
    memory = attention.memory(rows.blocks)
    hidden = model.embed(torch.tensor(group.ids))
    residual: torch.Tensor | None = None
    found = KV()
    for layer in range(model.layers):
        yield
        query, key, value, residual = model.project(layer, hidden, residual)
        if layer == group.until:
            return Computed(KV([key], [value]), queries=query)
        if group.unrotated:
            found.keys.append(key.clone())
        query, turned = model.rotate(layer, positions, query, key)
        assert turned is not None, "a rotation gives back what it was given"
        if not group.unrotated:
            found.keys.append(turned)
        found.values.append(value)
        if layer == model.layers - 1 and not group.logits_of:
            break  # of the last layer nothing but KV is wanted
        sources.write(layer, attention, memory)
        attention.write(layer, memory, turned, value, slots)
        attended = attention.attend(layer, memory, plan, query, turned, value)
        hidden, residual = model.finish(layer, attended, residual)
    if not group.logits_of:
        return Computed(found)
    wanted = torch.tensor(group.logits_of)
    assert residual is not None, "a model has layers"
    return Computed(found, model.logits(hidden[wanted], residual[wanted]))


def _slots(share: Share, block_size: int) -> list[int]:
    return [share.block * block_size + position for position in share.cached]


def _joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [value for part in parts for value in part]
