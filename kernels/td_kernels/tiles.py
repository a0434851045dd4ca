"""How much of a tensor one Triton program works on."""

from __future__ import annotations

from typing import NamedTuple

NUMBERS = 2048
"""About as many numbers a tile has: 16 for each thread of a program's four warps. That keeps enough
loads under way for a kernel that only moves memory, and fits its registers. Not tuned on any GPU
yet: `make gpu-check` says what it gives."""


class Tile(NamedTuple):
    """Powers of two."""

    tokens: int
    heads: int


def head_tiles(heads: int, width: int) -> Tile:
    """For [tokens, heads, width]: all heads, if they are few, of as many tokens as fit."""
    wide = power(width)
    some = min(power(heads), max(1, NUMBERS // wide))
    return Tile(max(1, NUMBERS // (wide * some)), some)


class Rows(NamedTuple):
    """Powers of two."""

    rows: int
    width: int


def row_tiles(width: int) -> Rows:
    """For [rows, width]: a row's first numbers, or all of them, of as many rows as fit."""
    wide = min(power(width), NUMBERS)
    return Rows(NUMBERS // wide, wide)


def power(number: int) -> int:
    """The least power of two that is not less, at least 1."""
    return 1 << max(0, number - 1).bit_length()
