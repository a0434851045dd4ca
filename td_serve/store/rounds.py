"""What passes leave in a prefill engine's worker: canonical sequences, histories, mirrors; and
what has been read for them.

A mirror is kept as what is to be loaded, until its request has loaded it or its round has been
prefilled; as how the member's next prompt begins, until room is wanted. It holds what it refers to
for as long as it lives.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from td_serve.segments import alike
from td_serve.store.below import Below
from td_serve.store.codecs import BEGINNING, LOSSLESS, Codec, Codecs, Coded
from td_serve.store.families import NOTHING, CodedRun, History, Mirror, Run
from td_serve.store.kv import KV

CANONICAL, AHEAD, HISTORY, WRITTEN = "canonical", "ahead", "history", "written"
"""Kinds of runs: what all share, keys before rotation; a guess at it that goes on otherwise than
what is kept; what a member's prompt begins with; and what a turn has put out, keys before
rotation, until the pass that takes it over."""

_KEPT_BELOW = (CANONICAL, HISTORY)


class RoundStore:
    """All that passes have left. What is kept goes, the least recently used first, when together it
    holds more than `budget_bytes`; what several hold counts once. The last one stays, with what it
    refers to, whatever their size. A canonical sequence goes after all mirrors that refer to it:
    another one of the same tokens would not have the same KV, bit for bit.

    What a mirror holds stays with it: before a pass, all those that are to be loaded may hold as
    much again that nothing else does (`worker`)."""

    def __init__(self, budget_bytes: int, codecs: Codecs = LOSSLESS) -> None:
        self.budget_bytes = budget_bytes
        self.codecs = codecs
        """How histories' own rows are kept."""
        self._kept: OrderedDict[tuple[str, str], History] = OrderedDict()
        self._holders: Counter[int] = Counter()
        """How many of what is kept hold a KV, by its identity."""
        self._bytes = 0
        self.below: Below | None = None
        """Where canonical sequences and histories are kept once more, if anywhere."""
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
        """What is kept under a name, here or below, and how many of `token_ids` it begins with."""
        self._fetch(kind, name)
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
        self._keep(kind, name, one)
        if self.below is not None and kind in _KEPT_BELOW:
            canonical = self._canonical_of(one)
            if canonical is not None:
                self.below.save(kind, name, one, canonical)

    def _keep(self, kind: str, name: str, one: History) -> None:
        before = self._kept.get((kind, name))
        if kind == CANONICAL and isinstance(before, Run) and isinstance(one, Run):
            self._refer(before, one)
        self.drop(kind, name)
        self._kept[kind, name] = one
        self._hold(one)
        while self._bytes > self.budget_bytes and (place := self._next_out()) is not None:
            if self.below is not None:
                self.below.settle(*place)  # or what waits there would be held, as well
            self.drop(*place)

    def settle(self) -> None:
        """Come back when all that is kept is below, too, as far as that can be."""
        if self.below is not None:
            for place in self._kept:
                self.below.settle(*place)

    def _fetch(self, kind: str, name: str) -> None:
        """Take what is kept below alone."""
        is_kept_there = kind in _KEPT_BELOW and bool(name)
        if self.below is None or not is_kept_there or (kind, name) in self._kept:
            return
        with self.spending("fetch"):
            found = self.below.load(kind, name, self._canonical)
        if found is not None and (kind == HISTORY or isinstance(found, Run)):
            self._keep(kind, name, found)

    def _canonical(self, name: str) -> Run | None:
        """What is kept as a canonical sequence, here or below."""
        self._fetch(CANONICAL, name)
        found = self._kept.get((CANONICAL, name))
        return found if isinstance(found, Run) else None

    def _canonical_of(self, one: History) -> str | None:
        """Under which name a mirror's canonical sequence is kept, None if it is not; "" of what is
        no mirror."""
        if not isinstance(one, Mirror):
            return ""
        for (kind, name), kept in self._kept.items():
            if kind == CANONICAL and kept is one.canonical:
                return name
        return None

    def _next_out(self) -> tuple[str, str] | None:
        """Under which name what goes next is kept; None where there is nothing that may go."""
        last = next(reversed(self._kept))
        for place, one in self._kept.items():
            is_held = place[0] == CANONICAL and any(self._holders[id(kv)] > 1 for kv in one.holds())
            if place != last and not is_held:
                return place
        return None

    def misses(self, name: str, token_ids: Sequence[int], is_behind: bool) -> int:
        """From which token on a history lacks what an engine has computed of a prompt; -1 if it
        lacks nothing. `is_behind` a mirror, only that can be added to it: the rest is its own."""
        history, common = self.find(HISTORY, name, token_ids)
        if common == len(token_ids):
            return -1
        if not is_behind:
            return 0
        goes_on = isinstance(history, Mirror) and common == len(history.token_ids)
        return common if goes_on else -1

    def keep_longer(self, name: str, token_ids: list[int], kv: KV) -> None:
        """Keep a prompt as a history: all of it, or, where there are fewer tokens in `kv`, what is
        kept and these behind it."""
        is_whole = kv.tokens == len(token_ids)
        coded = self._coded(kv, BEGINNING if is_whole else 0)
        if not is_whole:
            history = self.get(HISTORY, name)
            assert isinstance(history, Mirror), "rows go on behind a mirror alone"
            self.keep(HISTORY, name, history.followed_by(token_ids, coded))
        elif isinstance(coded, KV):
            self.keep(HISTORY, name, Run(token_ids, coded))
        else:
            self.keep(HISTORY, name, CodedRun(token_ids, coded))

    def _coded(self, kv: KV, beginning: int) -> KV | Coded:
        """What is a member's own, as it is kept."""
        codec = self.codecs.private
        return kv if codec is Codec.LOSSLESS else Coded.of(kv, codec, beginning)

    def _refer(self, before: Run, now: Run) -> None:
        has_all = alike(before.token_ids, now.token_ids) == len(before.token_ids)
        if before.origin != now.origin or not has_all:
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
    def bytes_to_load(self) -> int:
        """What mirrors hold that are to be loaded, and nothing else does."""
        held = {id(kv): kv.bytes for one in self.mirrors.values() for kv in one.holds()}
        return sum(size for kv, size in held.items() if not self._holders[kv])

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
        is_within = self._bytes <= self.budget_bytes or self._next_out() is None
        assert is_within, "more than there is room for"
        kept = [one for one in self._kept.values() if isinstance(one, Mirror)]
        for mirror in [*kept, *self.mirrors.values()]:
            tokens = len(mirror.token_ids)
            own = sum(len(rows.positions) for rows in mirror.own)
            parts = mirror.history_tokens + len(mirror.cached) + own
            assert parts == tokens, f"a mirror of {tokens} tokens has {parts}"
            for rows in mirror.own:
                assert rows.kv.tokens >= len(rows.positions), "a mirror has rows without KV"
