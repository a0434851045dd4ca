"""How a round's KV is kept: what all share once, and of each member what is its own.

A mirror is a member's prompt as references into its canonical sequence and its history, and rows of
its own (TokenDance, section 4.3, with what all share in the place of a master). Nothing is put
together before it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch

from td_serve.segments import alike
from td_serve.store.codecs import Codec, Codecs, Coded, followed
from td_serve.store.kv import KV
from td_serve.types import Rule


class Rotation(Protocol):
    """What turns keys to their positions: a model's own, layer by layer."""

    def rotate(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn from position 0 to `positions`. May change its arguments."""
        ...


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

    def parts(self, model: Rotation, layer: int, first: int, last: int) -> Iterator[Kept]:
        """Tokens [first, last) of one layer, in no order."""
        ...

    def holds(self) -> list[KV | Coded]:
        """What it keeps alive; others may, too."""
        ...


K = TypeVar("K", KV, Coded)


@dataclass(frozen=True)
class _Tokens(Generic[K]):
    """A run of tokens and their KV. Of a canonical sequence `origin` says where it began: one of
    the same origin that is longer has the same KV as far as both have the same tokens, bit for bit;
    another one of the same tokens may not."""

    token_ids: list[int]
    kv: K
    origin: str = ""

    def until(self, tokens: int) -> Self:
        """Its first tokens; fewer are copied, or the others would be kept, too."""
        if tokens == len(self.token_ids):
            return self
        return replace(self, token_ids=self.token_ids[:tokens], kv=self.kv.part(0, tokens))

    def parts(self, model: Rotation, layer: int, first: int, last: int) -> Iterator[Kept]:
        if first < last:
            yield Kept(torch.arange(first, last), *self.kv.at(layer, slice(first, last)))

    def holds(self) -> list[KV | Coded]:
        return [self.kv]


@dataclass(frozen=True)
class Run(_Tokens[KV]):
    """Tokens whose KV is kept as it was."""

    @property
    def exact(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class CodedRun(_Tokens[Coded]):
    """Tokens whose KV is not kept as exactly as it was."""

    @property
    def exact(self) -> int:
        return 0


NOTHING = Run([], KV())


@dataclass(frozen=True)
class Rows:
    """What passes have computed of a prompt: a row of `kv` for each of `positions`, which are int64
    and ascend. Of a diff, what is shared but was computed anew, `sources` says where it stands in
    the canonical sequence; where `kv` is coded, it is what they differ by."""

    positions: torch.Tensor
    kv: KV | Coded
    sources: torch.Tensor | None = None

    def until(self, tokens: int) -> Rows:
        """Those among the prompt's first `tokens` tokens; fewer are copied, or the others would be
        kept, too."""
        count = _between(self.positions, 0, tokens).stop
        if count == len(self.positions):
            return self
        sources = None if self.sources is None else self.sources[:count].clone()
        return Rows(self.positions[:count].clone(), self.kv.part(0, count), sources)

    def followed_by(self, other: Rows) -> Rows | None:
        """Both in one; None where they are not kept alike."""
        kv = followed(self.kv, other.kv)
        if kv is None or (self.sources is None) != (other.sources is None):
            return None
        sources = None
        if self.sources is not None and other.sources is not None:
            sources = torch.cat([self.sources, other.sources])
        return Rows(torch.cat([self.positions, other.positions]), kv, sources)


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
    history: Run | CodedRun
    history_tokens: int
    own: tuple[Rows, ...]

    def parts(self, model: Rotation, layer: int, first: int, last: int) -> Iterator[Kept]:
        yield from self.history.parts(model, layer, first, min(last, self.history_tokens))
        some = _between(self.cached, first, last)
        if len(positions := self.cached[some]):
            yield _shared(model, layer, self.canonical, positions, self.sources[some])
        for rows in self.own:
            some = _between(rows.positions, first, last)
            if len(positions := rows.positions[some]):
                found = Kept(positions, *rows.kv.at(layer, some))
                if isinstance(rows.kv, Coded) and rows.sources is not None:
                    base = _shared(model, layer, self.canonical, positions, rows.sources[some])
                    found = Kept(positions, base.keys + found.keys, base.values + found.values)
                yield found

    def followed_by(self, token_ids: list[int], kv: KV | Coded) -> Mirror:
        """The mirror of `token_ids`, which begin as this one's: what follows is its own, and this
        is its KV."""
        rows = Rows(torch.arange(len(self.token_ids), len(token_ids)), kv)
        return replace(self, token_ids=token_ids, own=_merged([*self.own, rows]))

    def coded(self, model: Rotation, codecs: Codecs) -> Mirror:
        """The same, what it has of its own kept by `codecs`; what is coded already stays so."""
        own = [
            _coded(rows, codecs.private if rows.sources is None else codecs.diffs, self, model)
            for rows in self.own
        ]
        exact = self.exact if codecs.private is Codec.LOSSLESS else 0
        return replace(self, exact=exact, own=_merged(own))

    def holds(self) -> list[KV | Coded]:
        return [self.canonical.kv, self.history.kv, *(rows.kv for rows in self.own)]

    def begins_in(self, token_ids: Sequence[int], tokens: int) -> bool:
        """Whether another canonical sequence, of `token_ids`, has all that the first `tokens`
        tokens take from this one's, in the same places."""
        taken = [(self.cached, self.sources)]
        taken += [(one.positions, one.sources) for one in self.own if one.sources is not None]
        sources = torch.cat([there[_between(here, 0, tokens)] for here, there in taken])
        last = int(sources.max()) if len(sources) else -1
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
    if isinstance(history, Run | CodedRun):
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


def _shared(
    model: Rotation, layer: int, canonical: Run, positions: torch.Tensor, sources: torch.Tensor
) -> Kept:
    """What a canonical sequence has at `sources`, turned to `positions`."""
    keys, _ = model.rotate(layer, positions, canonical.kv.keys[layer][sources], None)
    return Kept(positions, keys, canonical.kv.values[layer][sources])


def _coded(rows: Rows, codec: Codec, mirror: Mirror, model: Rotation) -> Rows:
    if codec is Codec.LOSSLESS or isinstance(rows.kv, Coded):
        return rows
    kv = rows.kv
    if rows.sources is not None:
        keys, values = [], []
        for layer in range(len(kv.keys)):
            base = _shared(model, layer, mirror.canonical, rows.positions, rows.sources)
            keys.append(kv.keys[layer] - base.keys)
            values.append(kv.values[layer] - base.values)
        kv = KV(keys, values)
    return replace(rows, kv=Coded.of(kv, codec))


def _merged(own: Sequence[Rows]) -> tuple[Rows, ...]:
    """The same rows in few parts, however many passes have made them: of each kind each is more
    than twice as long as the next."""
    return (
        *_merged_alike([rows for rows in own if rows.sources is None]),
        *_merged_alike([rows for rows in own if rows.sources is not None]),
    )


def _merged_alike(own: Sequence[Rows]) -> list[Rows]:
    parts: list[Rows] = []
    for rows in own:
        if not len(rows.positions):
            continue
        while parts and len(parts[-1].positions) <= 2 * len(rows.positions):
            both = parts[-1].followed_by(rows)
            if both is None:
                break
            parts.pop()
            rows = both
        parts.append(rows)
    return parts
