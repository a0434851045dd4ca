"""Is a mirror restored faster straight into its pages than by way of a dense copy?

Needs torch, and Triton where there is a GPU; neither vLLM nor td_serve:

    python scripts/restore_bench.py --layers 30 --heads 3 --size 64 --tokens 3000 --patch 0.15

Both ways are held against the reference first. Bytes are what has to be read and written once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from td_kernels.fused_restore import dense, reference
from td_kernels.planes import Planes, Turn
from td_kernels.restore_pipeline import restore_layers

BLOCK_SIZE = 16
DIFF_BLOCK = 32
"""Tokens of a block that differs, as in TokenDance (arXiv 2604.03143, section 6.4)."""


class Shape(NamedTuple):
    """Of one rank's KV, and of the mirrors of one master."""

    layers: int
    heads: int
    size: int
    tokens: int
    patch: float
    """Which part of a mirror's rows is its own."""
    mirrors: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What one restore of all mirrors reads and writes."""
        row = 2 * self.heads * self.size * torch.empty(0, dtype=self.dtype).element_size()
        return 2 * self.mirrors * self.layers * self.tokens * row


class Mirror(NamedTuple):
    """A list has an entry for each layer; the rest is the same in all."""

    masters: list[Planes]
    patches: list[Planes]
    pages: list[Planes]
    source: torch.Tensor
    slots: torch.Tensor
    turn: Turn
    plan: dense.Plan

    def fused(self) -> None:
        restore_layers(self.masters, self.patches, self.source, self.slots, self.pages, self.turn)

    def dense(self) -> None:
        for layer in zip(self.masters, self.patches, self.pages, strict=True):
            master, patch, pages = layer
            dense.restore(master, patch, self.plan, pages, self.turn)


def mirrors(shape: Shape, device: str) -> Iterator[Mirror]:
    """Mirrors that stand elsewhere than their master, some blocks of rows their own, in pages that
    lie in no order."""
    layers, heads, size, tokens, patch, count, dtype = shape
    draw = torch.Generator().manual_seed(0)
    draw_there = torch.Generator(device).manual_seed(0)

    def planes(*dimensions: int) -> Planes:
        made = torch.randn(2, *dimensions, generator=draw_there, device=device).to(dtype)
        return Planes(made[0], made[1])

    table = rotary_table(tokens + 7 + count, size).to(device)
    masters = [planes(tokens, heads, size) for _ in range(layers)]
    blocks = -(-tokens // BLOCK_SIZE)
    for number in range(count):
        diffs = torch.randperm(-(-tokens // DIFF_BLOCK), generator=draw)
        rows = (diffs[:, None] * DIFF_BLOCK + torch.arange(DIFF_BLOCK)).flatten()
        own = rows[rows < tokens][: round(patch * tokens)].sort().values
        source = torch.arange(tokens)
        source[own] = -1 - torch.arange(len(own))
        to = torch.arange(tokens) + 7 + number
        order = torch.randperm(blocks, generator=draw)
        at = torch.arange(tokens)
        slots = order[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        turn = Turn(table, to.to(device), torch.where(source < 0, to, -1).to(device))
        source, slots = source.to(device), slots.to(device)
        patches = [planes(len(own), heads, size) for _ in masters]
        # What is left in the last block keeps its NaN.
        room = torch.full((layers, 2, blocks, BLOCK_SIZE, heads, size), torch.nan, dtype=dtype)
        pages = [Planes(one[0], one[1]) for one in room.to(device)]
        plan = dense.plan(source, slots, BLOCK_SIZE)
        yield Mirror(masters, patches, pages, source, slots, turn, plan)


def rotary_table(positions: int, rotary: int) -> torch.Tensor:
    """Cosines, then sines, float32."""
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    return torch.cat([angles.cos(), angles.sin()], -1)


def check(mirror: Mirror) -> None:
    """Raises AssertionError where either way gives other pages than the reference."""
    last, pages = len(mirror.pages) - 1, mirror.pages[-1]
    expected = Planes(*(torch.full_like(plane, torch.nan) for plane in pages))
    planes = mirror.masters[last], mirror.patches[last]
    reference.restore(*planes, mirror.source, mirror.slots, expected, mirror.turn)
    for restore in (mirror.fused, mirror.dense):
        for plane in pages:
            plane.fill_(torch.nan)
        restore()
        for found, wanted in zip(pages, expected, strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)


def alternating(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each; they take turns, so that what else goes on hits all of them."""
    took: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, took, strict=True):
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 30), ("heads", 3), ("size", 64), ("tokens", 3000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--patch", type=float, default=0.15)
    parser.add_argument("--mirrors", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=16)
    given = parser.parse_args()
    numbers = given.layers, given.heads, given.size, given.tokens, given.patch, given.mirrors
    shape = Shape(*numbers, getattr(torch, given.dtype))
    some = list(mirrors(shape, "cuda" if torch.cuda.is_available() else "cpu"))
    check(some[0])
    both = alternating(
        [lambda: [one.dense() for one in some], lambda: [one.fused() for one in some]],
        given.repeats,
    )
    for name, seconds in zip(("dense", "fused"), both, strict=True):
        print(f"{name}  {seconds * 1e3:8.2f} ms  {shape.bytes / seconds / 1e9:7.2f} GB/s")
    print(f"fused is {both[0] / both[1]:.2f} times as fast")


if __name__ == "__main__":
    main()
