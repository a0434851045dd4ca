"""How exactly the rows that a mirror has of its own are kept.

`lossless` keeps them as they are. `int8` and `int4` keep what they differ by from what all share,
or, of what nobody shares (`int8` alone), the rows themselves: turned by a Hadamard matrix, in runs
of 64 numbers, so that none of them stands out (QuaRot, arXiv 2404.00456), and in groups of 32, each
with a scale of its own, half precision, by which its largest number is the largest that there is
room for.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from td_serve.errors import StoreError
from td_serve.store.kv import KV, Shape

_TURNED = 64
_GROUP = 32
_LARGEST = {8: 127, 4: 7}
BEGINNING = 32
"""Tokens at the beginning of a prompt that are kept as they are: attention holds on to the first
ones, and what they lose weighs most (SmolLM2-135M: half of the divergence that int8 adds)."""


class Codec(enum.Enum):
    """By the name by which a configuration asks for it."""

    LOSSLESS = "lossless"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Of a number, where numbers are coded."""
        return {Codec.INT8: 8, Codec.INT4: 4}[self]


@dataclass(frozen=True)
class Codecs:
    """How what was computed anew of the shared texts is kept, and how what is a member's own."""

    diffs: Codec = Codec.LOSSLESS
    private: Codec = Codec.LOSSLESS

    def __post_init__(self) -> None:
        if self.private is Codec.INT4:
            raise ValueError("private: 'int4', expected 'lossless' or 'int8'")


LOSSLESS = Codecs()


@dataclass(frozen=True)
class Plane:
    """Rows of one layer's keys or values: numbers, [tokens, groups, 32] or half as many bytes, and
    their groups' scales, [tokens, groups]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: torch.Tensor, bits: int) -> Plane:
        """Of rows [tokens, width]; a width that is no multiple of 64 is filled up."""
        tokens, width = rows.shape
        runs = -(-width // _TURNED)
        filled = torch.nn.functional.pad(rows.float(), (0, runs * _TURNED - width))
        turned = filled.view(tokens, runs, _TURNED) @ _hadamard()
        grouped = turned.reshape(tokens, runs * _TURNED // _GROUP, _GROUP)
        largest = _LARGEST[bits]
        scales = (grouped.abs().amax(-1) / largest).half()
        # A scale of nothing is nothing's; and halves are rounded, so that numbers may be too large.
        steps = torch.where(scales > 0, scales.float(), 1.0)[..., None]
        numbers = (grouped / steps).round().clamp(-largest, largest).to(torch.int8)
        if bits == 4:
            low, high = (numbers + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
            numbers = low | high << 4
        return cls(numbers, scales, width, rows.dtype)

    @classmethod
    def checked(
        cls, numbers: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype, bits: int
    ) -> Plane:
        """One from elsewhere. Raises StoreError if these do not make one."""
        groups = -(-width // _TURNED) * _TURNED // _GROUP
        wanted = (*scales.shape[:1], groups, _GROUP * bits // 8)
        kind = torch.uint8 if bits == 4 else torch.int8
        if tuple(numbers.shape) != wanted or numbers.dtype is not kind:
            raise StoreError(f"numbers {list(numbers.shape)} {numbers.dtype}, expected {wanted}")
        if tuple(scales.shape) != wanted[:2] or scales.dtype is not torch.half:
            raise StoreError(f"scales {list(scales.shape)} {scales.dtype}, expected {wanted[:2]}")
        return cls(numbers, scales, width, dtype)

    def rows(self, some: slice) -> torch.Tensor:
        """Rows, [tokens, width]."""
        numbers = self.numbers[some]
        if numbers.dtype == torch.uint8:
            halves = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)
            numbers = halves.to(torch.int8) - 8
        grouped = numbers.float() * self.scales[some].float()[..., None]
        runs = self.scales.shape[1] * _GROUP // _TURNED
        turned = grouped.reshape(len(numbers), runs, _TURNED) @ _hadamard()
        return turned.flatten(1)[:, : self.width].to(self.dtype)

    def part(self, first: int, last: int) -> Plane:
        numbers, scales = self.numbers[first:last].clone(), self.scales[first:last].clone()
        return Plane(numbers, scales, self.width, self.dtype)

    def followed_by(self, other: Plane) -> Plane:
        numbers = torch.cat([self.numbers, other.numbers])
        return Plane(numbers, torch.cat([self.scales, other.scales]), self.width, self.dtype)

    @property
    def bytes(self) -> int:
        return sum(one.element_size() * one.numel() for one in (self.numbers, self.scales))


@functools.cache
def _hadamard() -> torch.Tensor:
    """[64, 64], which undoes itself."""
    made = torch.ones(1, 1)
    while len(made) < _TURNED:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / len(made) ** 0.5


@dataclass(frozen=True)
class Coded:
    """Rows of keys and values as `int8` or `int4`, layer by layer: what `KV` is without. The rows
    of `beginning` come first, as they are."""

    codec: Codec
    keys: Sequence[Plane]
    values: Sequence[Plane]
    beginning: KV = field(default_factory=KV)

    @classmethod
    def of(cls, kv: KV, codec: Codec, beginning: int = 0) -> Coded:
        """All but the `beginning` coded."""
        bits = codec.bits
        keys = [Plane.of(rows[beginning:], bits) for rows in kv.keys]
        values = [Plane.of(rows[beginning:], bits) for rows in kv.values]
        return cls(codec, keys, values, kv.part(0, beginning) if beginning else KV())

    @property
    def tokens(self) -> int:
        return self.beginning.tokens + (len(self.keys[0].numbers) if self.keys else 0)

    @property
    def bytes(self) -> int:
        return self.beginning.bytes + sum(plane.bytes for plane in [*self.keys, *self.values])

    @property
    def shape(self) -> Shape:
        """Of what is coded. Raises IndexError if there is nothing."""
        return Shape(len(self.keys), self.keys[0].width, self.keys[0].dtype)

    def at(self, layer: int, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some tokens, [tokens, KV heads * head size]."""
        first, last, _ = some.indices(self.tokens)
        before, behind = self._split(first, last)
        keys, values = self.keys[layer].rows(behind), self.values[layer].rows(behind)
        if before.start < before.stop:
            keys = torch.cat([self.beginning.keys[layer][before], keys])
            values = torch.cat([self.beginning.values[layer][before], values])
        return keys, values

    def part(self, first: int, last: int) -> Coded:
        """Tokens [first, last), in memory of their own."""
        before, behind = self._split(first, last)
        keys = [plane.part(behind.start, behind.stop) for plane in self.keys]
        values = [plane.part(behind.start, behind.stop) for plane in self.values]
        beginning = self.beginning.part(before.start, before.stop)
        return Coded(self.codec, keys, values, beginning)

    def followed_by(self, other: Coded) -> Coded | None:
        """These tokens, then the other's; None where they are not kept alike."""
        if self.codec is not other.codec or other.beginning.tokens:
            return None
        keys = [one.followed_by(two) for one, two in zip(self.keys, other.keys, strict=True)]
        values = [one.followed_by(two) for one, two in zip(self.values, other.values, strict=True)]
        return Coded(self.codec, keys, values, self.beginning)

    def _split(self, first: int, last: int) -> tuple[slice, slice]:
        """Tokens [first, last): which of the beginning, and which of the coded ones."""
        count = self.beginning.tokens
        before = slice(min(first, count), min(last, count))
        return before, slice(max(first, count) - count, max(last, count) - count)


def followed(some: KV | Coded, others: KV | Coded) -> KV | Coded | None:
    """These tokens, then the others; None where they are not kept alike."""
    if isinstance(some, KV) and isinstance(others, KV):
        return some.followed_by(others)
    if isinstance(some, Coded) and isinstance(others, Coded):
        return some.followed_by(others)
    return None
