"""What passes leave in a prefill engine's worker: canonical sequences, histories, mirrors; and
what has been read for them.

A mirror is a member's prompt as references into its canonical sequence and its history, and the
rows of its own. It holds both for as long as it lives: from its pass until it is released, which is
when its request has loaded it, or its round has been prefilled.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from td_serve.engine.collective import KV
from td_serve.segments import alike


@dataclass(frozen=True)
class Run:
    """A run of tokens and their KV."""

    token_ids: list[int]
    kv: KV

    @property
    def bytes(self) -> int:
        return sum(part.element_size() * part.numel() for part in [*self.kv.keys, *self.kv.values])


NOTHING = Run([], KV())

CANONICAL, AHEAD, HISTORY, WRITTEN = "canonical", "ahead", "history", "written"
"""Kinds of runs: what all share, keys before rotation; a guess at it that goes on otherwise than
what is kept; what a member's prompt begins with; and what a turn has put out, keys before
rotation, until the pass that takes it over."""


@dataclass(frozen=True)
class Mirror:
    """A member's first `tokens` tokens: `history_tokens` of its history, `cached` positions from
    the canonical sequence's `sources`, and its `own` rows at `positions`."""

    tokens: int
    canonical: Run
    cached: list[int]
    sources: list[int]
    history: Run
    history_tokens: int
    positions: list[int]
    own: KV


class RoundStore:
    """All that passes have left. Runs of all kinds go, the least recently used first, when together
    they hold more than `budget_bytes` (the last one stays, whatever its
    size). What a mirror holds stays with it: all mirrors' own rows may take as much again
    (`worker`)."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._runs: OrderedDict[tuple[str, str], Run] = OrderedDict()
        self._bytes = 0
        self.mirrors: dict[str, Mirror] = {}
        self.spent: dict[str, float] = {}
        """Seconds from beginning to end of each phase of passes and loads, summed up."""

    @contextlib.contextmanager
    def spending(self, phase: str) -> Iterator[None]:
        """Count the time within; what else the engine did meanwhile counts, too."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.spent[phase] = self.spent.get(phase, 0.0) + took

    def find(self, kind: str, name: str, token_ids: Sequence[int]) -> tuple[Run, int]:
        """What is kept under a name, and how many of `token_ids` it begins with."""
        run = self._runs.get((kind, name), NOTHING)
        common = alike(run.token_ids, token_ids)
        if common:
            self._runs.move_to_end((kind, name))
        return run, common

    def keep(self, kind: str, name: str, run: Run) -> None:
        """Keep a run in place of what was kept under its name."""
        self.drop(kind, name)
        self._runs[kind, name] = run
        self._bytes += run.bytes
        while self._bytes > self.budget_bytes and len(self._runs) > 1:
            self.drop(*next(iter(self._runs)))

    def names(self, kind: str) -> list[str]:
        """Under which names anything of a kind is kept."""
        return [name for one, name in self._runs if one == kind]

    def has(self, kind: str, name: str) -> bool:
        """Whether anything is kept under a name."""
        return (kind, name) in self._runs

    def get(self, kind: str, name: str) -> Run:
        """What is kept under a name, all of it. Raises KeyError."""
        return self._runs[kind, name]

    def drop(self, kind: str, name: str) -> None:
        """Keep nothing under this name; if nothing is, nothing changes."""
        if (run := self._runs.pop((kind, name), None)) is not None:
            self._bytes -= run.bytes

    @property
    def own_rows(self) -> int:
        """How many rows all mirrors have of their own."""
        return sum(len(mirror.positions) for mirror in self.mirrors.values())

    def release(self, names: Iterable[str]) -> None:
        """These mirrors are not needed any more; unknown names change nothing."""
        for name in names:
            self.mirrors.pop(name, None)

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert self._bytes == sum(run.bytes for run in self._runs.values()), "miscounted bytes"
        for name, mirror in self.mirrors.items():
            parts = mirror.history_tokens + len(mirror.cached) + len(mirror.positions)
            assert parts == mirror.tokens, f"mirror {name}: {parts} of {mirror.tokens} tokens"
            assert mirror.own.tokens == len(mirror.positions), f"mirror {name}: rows without KV"
