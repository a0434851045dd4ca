"""Keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """Of a model's KV: layers, KV heads * head size, and dtype."""

    layers: int
    width: int
    dtype: torch.dtype


@dataclass
class KV:
    """Keys and values of a run of tokens: for each layer, [tokens, KV heads * head size]."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    @property
    def bytes(self) -> int:
        return sum(part.element_size() * part.numel() for part in [*self.keys, *self.values])

    @property
    def shape(self) -> Shape:
        """Raises IndexError if there is none."""
        return Shape(len(self.keys), self.keys[0].shape[1], self.keys[0].dtype)

    def at(self, layer: int, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some tokens in one layer."""
        return self.keys[layer][some], self.values[layer][some]

    def view(self, first: int, last: int | None = None) -> KV:
        """Tokens [first, last), in the same memory."""
        some = slice(first, last)
        return KV([keys[some] for keys in self.keys], [values[some] for values in self.values])

    def part(self, first: int, last: int) -> KV:
        """Tokens [first, last), in memory of their own."""
        return KV(
            [keys[first:last].clone() for keys in self.keys],
            [values[first:last].clone() for values in self.values],
        )

    def rows(self, places: torch.Tensor) -> KV:
        """The tokens at these places."""
        return KV(
            [keys.index_select(0, places) for keys in self.keys],
            [values.index_select(0, places) for values in self.values],
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
