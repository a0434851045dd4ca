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


@dataclass
class KV:
    """Keys and values of a run of tokens: for each layer, [tokens, KV heads * head size]."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def part(self, first: int, last: int) -> KV:
        """Tokens [first, last), in memory of their own."""
        return KV(
            [keys[first:last].clone() for keys in self.keys],
            [values[first:last].clone() for values in self.values],
        )

    def followed_by(self, other: KV) -> KV:
        """These tokens, then the other's."""
        return joined([self, other])


def joined(parts: Sequence[KV]) -> KV:
    """The parts' tokens, one part after the other."""
    some = [part for part in parts if part.keys]
    if len(some) < 2:
        return some[0] if some else KV()
    return KV(
        [torch.cat(layer) for layer in zip(*(part.keys for part in some), strict=True)],
        [torch.cat(layer) for layer in zip(*(part.values for part in some), strict=True)],
    )


def spread(parts: Sequence[KV], places: Sequence[torch.Tensor]) -> KV:
    """The parts' tokens at their `places`, which together are all from 0 on."""
    total = sum(map(len, places))

    def put(layer: Sequence[torch.Tensor]) -> torch.Tensor:
        made = layer[0].new_empty(total, layer[0].shape[1])
        for part, at in zip(layer, places, strict=True):
            made[at] = part
        return made

    return KV(
        [put(layer) for layer in zip(*(part.keys for part in parts), strict=True)],
        [put(layer) for layer in zip(*(part.values for part in parts), strict=True)],
    )


@dataclass
class Group:
    """What a pass computes. `ids` are the rows' tokens; `histories` each member's, or None.

    `canonical` holds keys before rotation; histories and everything computed hold them rotated,
    unless the pass is `unrotated`: it then computes a canonical sequence. With `until`, it computes
    that one layer's queries, keys and values alone.
    """

    rows: Rows
    ids: list[int]
    canonical: KV
    histories: Sequence[KV | None]
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
            (history, torch.arange(history.tokens) + share.block * rows.block_size)
            for history, share in zip(group.histories, rows.shares, strict=True)
            if history is not None and history.tokens
        ]

    def write(self, layer: int, attention: PagedAttention, memory: torch.Tensor) -> None:
        """Put this layer's into `memory`."""
        if len(self._sources):
            keys = self._canonical.keys[layer].index_select(0, self._sources)
            values = self._canonical.values[layer].index_select(0, self._sources)
            keys, _ = self._model.rotate(layer, self._positions, keys, None)
            attention.write(layer, memory, keys, values, self._slots)
        for history, slots in self._histories:
            attention.write(layer, memory, history.keys[layer], history.values[layer], slots)


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
