"""What passes leave in a prefill engine's worker: canonical sequences, histories, mirrors; and
what has been read for them.

A mirror is a member's prompt as references into its canonical sequence and its history, and rows of
its own. It holds what it refers to for as long as it lives: as what is to be loaded, until its
request has loaded it or its round has been prefilled; as how the member's next prompt begins, until
room is wanted.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from td_serve.engine.kv import KV
from td_serve.engine.model import LayeredModel
from td_serve.segments import alike
from td_serve.types import Rule


class Kept(NamedTuple):
    """Tokens at `positions` of a prompt, in one layer: keys as they stand there, and values."""

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class History(Protocol):
    """What is kept of how a prompt begins. `exact` of its tokens are what the prompt alone gives;
    behind them it is what a pass has made."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def exact(self) -> int: ...

    def parts(self, model: LayeredModel, layer: int, first: int, last: int) -> Iterator[Kept]:
        """Tokens [first, last) of one layer, in no order."""
        ...

    def holds(self) -> list[KV]:
        """What it keeps alive; others may, too."""
        ...


@dataclass(frozen=True)
class Run:
    """A run of tokens and their KV."""

    token_ids: list[int]
    kv: KV

    @property
    def exact(self) -> int:
        return len(self.token_ids)

    def until(self, tokens: int) -> Run:
        """Its first tokens; fewer are copied, or the others would be kept, too."""
        if tokens == len(self.token_ids):
            return self
        return Run(self.token_ids[:tokens], self.kv.part(0, tokens))

    def parts(self, model: LayeredModel, layer: int, first: int, last: int) -> Iterator[Kept]:
        if first < last:
            keys, values = self.kv.keys[layer][first:last], self.kv.values[layer][first:last]
            yield Kept(torch.arange(first, last), keys, values)

    def holds(self) -> list[KV]:
        return [self.kv]


NOTHING = Run([], KV())

CANONICAL, AHEAD, HISTORY, WRITTEN = "canonical", "ahead", "history", "written"
"""Kinds of runs: what all share, keys before rotation; a guess at it that goes on otherwise than
what is kept; what a member's prompt begins with; and what a turn has put out, keys before
rotation, until the pass that takes it over."""


@dataclass(frozen=True)
class Rows:
    """What passes have computed of a prompt: a row of `kv` for each of `positions`, which are int64
    and ascend."""

    positions: torch.Tensor
    kv: KV

    def until(self, tokens: int) -> Rows:
        """Those among the prompt's first `tokens` tokens; fewer are copied, or the others would be
        kept, too."""
        count = _between(self.positions, 0, tokens).stop
        if count == len(self.positions):
            return self
        return Rows(self.positions[:count].clone(), self.kv.part(0, count))


@dataclass(frozen=True)
class Mirror:
    """A member's prompt as references: `history_tokens` tokens of its `history` come first, those
    at positions `cached` are the canonical sequence's `sources`, and the others its `own` rows, of
    this pass and of those before it.

    Positions and sources are int64, positions ascending. What a pass by `rule` has made is no other
    rule's.
    """

    token_ids: list[int]
    rule: Rule
    exact: int
    canonical: Run
    cached: torch.Tensor
    sources: torch.Tensor
    history: Run
    history_tokens: int
    own: tuple[Rows, ...]
    new_rows: int
    """How many of its own pass."""

    def parts(self, model: LayeredModel, layer: int, first: int, last: int) -> Iterator[Kept]:
        yield from self.history.parts(model, layer, first, min(last, self.history_tokens))
        some = _between(self.cached, first, last)
        if len(positions := self.cached[some]):
            sources = self.sources[some]
            keys = self.canonical.kv.keys[layer][sources]
            keys, _ = model.rotate(layer, positions, keys, None)
            yield Kept(positions, keys, self.canonical.kv.values[layer][sources])
        for rows in self.own:
            some = _between(rows.positions, first, last)
            if len(positions := rows.positions[some]):
                yield Kept(positions, rows.kv.keys[layer][some], rows.kv.values[layer][some])

    def holds(self) -> list[KV]:
        return [self.canonical.kv, self.history.kv, *(rows.kv for rows in self.own)]

    def begins_in(self, token_ids: Sequence[int], tokens: int) -> bool:
        """Whether another canonical sequence, of `token_ids`, has all that the first `tokens`
        tokens take from this one's, in the same places."""
        some = _between(self.cached, 0, tokens)
        last = int(self.sources[some].max()) if some.stop > some.start else -1
        return alike(self.canonical.token_ids, token_ids) > last


def _between(positions: torch.Tensor, first: int, last: int) -> slice:
    """Where those from `first` to before `last` stand; positions ascend."""
    start, end = torch.searchsorted(positions, torch.tensor([first, last])).tolist()
    return slice(start, max(start, end))


def continued(history: History, tokens: int, more: Mirror) -> Mirror:
    """A mirror of a prompt that begins with `tokens` tokens of `history`: what has been made of the
    rest is `more`, which has no history, and whose canonical sequence has all that those take."""
    is_exact = tokens <= history.exact
    exact = max(more.exact, tokens) if is_exact else min(more.exact, history.exact)
    if isinstance(history, Run):
        return replace(more, exact=exact, history=history.until(tokens), history_tokens=tokens)
    assert isinstance(history, Mirror), f"no mirror goes on behind a {type(history).__name__}"
    assert history.begins_in(more.canonical.token_ids, tokens), "another canonical sequence"
    cached = _between(history.cached, 0, tokens)
    before = min(history.history_tokens, tokens)
    return replace(
        more,
        exact=exact,
        cached=torch.cat([history.cached[cached], more.cached]),
        sources=torch.cat([history.sources[cached], more.sources]),
        history=history.history.until(before),
        history_tokens=before,
        own=_merged([*(rows.until(tokens) for rows in history.own), *more.own]),
    )


def _merged(own: Sequence[Rows]) -> tuple[Rows, ...]:
    """The same rows in few parts, however many passes have made them: each is more than twice as
    long as the next."""
    parts: list[Rows] = []
    for rows in own:
        if not len(rows.positions):
            continue
        while parts and len(parts[-1].positions) <= 2 * len(rows.positions):
            before = parts.pop()
            positions = torch.cat([before.positions, rows.positions])
            rows = Rows(positions, before.kv.followed_by(rows.kv))
        parts.append(rows)
    return tuple(parts)


class RoundStore:
    """All that passes have left. What is kept goes, the least recently used first, when together it
    holds more than `budget_bytes` (the last one stays, whatever its size); what several hold counts
    once. What a mirror holds stays with it: all mirrors that are to be loaded may have as much
    again in own rows (`worker`)."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._kept: OrderedDict[tuple[str, str], History] = OrderedDict()
        self._holders: Counter[int] = Counter()
        """How many of what is kept hold a KV, by its identity."""
        self._bytes = 0
        self.mirrors: dict[str, Mirror] = {}
        """Those that are to be loaded."""
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

    def find(self, kind: str, name: str, token_ids: Sequence[int]) -> tuple[History, int]:
        """What is kept under a name, and how many of `token_ids` it begins with."""
        found = self._kept.get((kind, name), NOTHING)
        common = alike(found.token_ids, token_ids)
        if not common:
            return NOTHING, 0
        self._kept.move_to_end((kind, name))
        return found, common

    def find_run(self, kind: str, name: str, token_ids: Sequence[int]) -> tuple[Run, int]:
        """The same of a kind of which runs are kept alone."""
        found, common = self.find(kind, name, token_ids)
        assert isinstance(found, Run), f"a {kind} is kept as a {type(found).__name__}"
        return found, common

    def keep(self, kind: str, name: str, one: History) -> None:
        """Keep something in place of what was kept under its name. Where a canonical sequence has
        grown, mirrors refer to the longer one."""
        before = self._kept.get((kind, name))
        if kind == CANONICAL and isinstance(before, Run) and isinstance(one, Run):
            self._refer(before, one)
        self.drop(kind, name)
        self._kept[kind, name] = one
        self._hold(one)
        while self._bytes > self.budget_bytes and len(self._kept) > 1:
            self.drop(*next(iter(self._kept)))

    def keep_longer(self, kind: str, name: str, run: Run) -> None:
        """Keep a run, unless what is kept under its name begins so and goes on."""
        if self.find(kind, name, run.token_ids)[1] < len(run.token_ids):
            self.keep(kind, name, run)

    def _refer(self, before: Run, now: Run) -> None:
        if alike(before.token_ids, now.token_ids) < len(before.token_ids):
            return
        for place, one in self._kept.items():
            if isinstance(one, Mirror) and one.canonical is before:
                mirror = replace(one, canonical=now)
                self._hold(mirror)
                self._let_go(one)
                self._kept[place] = mirror

    def _hold(self, one: History) -> None:
        for kv in one.holds():
            self._bytes += 0 if self._holders[id(kv)] else kv.bytes
            self._holders[id(kv)] += 1

    def _let_go(self, one: History) -> None:
        for kv in one.holds():
            self._holders[id(kv)] -= 1
            if not self._holders[id(kv)]:
                del self._holders[id(kv)]
                self._bytes -= kv.bytes

    def touch(self, kind: str, name: str) -> None:
        """It has been used, if it is kept."""
        if (kind, name) in self._kept:
            self._kept.move_to_end((kind, name))

    def names(self, kind: str) -> list[str]:
        """Under which names anything of a kind is kept."""
        return [name for one, name in self._kept if one == kind]

    def has(self, kind: str, name: str) -> bool:
        """Whether anything is kept under a name."""
        return (kind, name) in self._kept

    def get(self, kind: str, name: str) -> History:
        """What is kept under a name, all of it. Raises KeyError."""
        return self._kept[kind, name]

    def drop(self, kind: str, name: str) -> None:
        """Keep nothing under this name; if nothing is, nothing changes."""
        if (one := self._kept.pop((kind, name), None)) is not None:
            self._let_go(one)

    @property
    def new_rows(self) -> int:
        """How many rows have been computed for those that are to be loaded."""
        return sum(mirror.new_rows for mirror in self.mirrors.values())

    def release(self, names: Iterable[str]) -> None:
        """These mirrors are not needed any more; unknown names change nothing."""
        for name in names:
            self.mirrors.pop(name, None)

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        held = {id(kv): kv for one in self._kept.values() for kv in one.holds()}
        assert self._bytes == sum(kv.bytes for kv in held.values()), "miscounted bytes"
        holders = Counter(id(kv) for one in self._kept.values() for kv in one.holds())
        assert self._holders == holders, "miscounted holders"
        assert self._bytes <= self.budget_bytes or len(self._kept) == 1, "more than there is room"
        kept = [one for one in self._kept.values() if isinstance(one, Mirror)]
        for mirror in [*kept, *self.mirrors.values()]:
            tokens = len(mirror.token_ids)
            own = sum(len(rows.positions) for rows in mirror.own)
            parts = mirror.history_tokens + len(mirror.cached) + own
            assert parts == tokens, f"a mirror of {tokens} tokens has {parts}"
            for rows in mirror.own:
                assert rows.kv.tokens >= len(rows.positions), "a mirror has rows without KV"
