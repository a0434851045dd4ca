"""What is kept, as objects of a lower tier.

KV is stored under its digest, in pieces, once whatever several refer to it; what is kept under a
name is a record that refers to them. A mirror's canonical sequence is referred to by name and
origin, since it grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import msgspec
import torch

from td_serve.errors import StoreError
from td_serve.store.codecs import Codec, Coded, Plane
from td_serve.store.families import CodedRun, Mirror, Rows, Run
from td_serve.store.kv import KV, joined
from td_serve.store.objects import Size, dtype_name, dtype_of
from td_serve.types import Rule

T = TypeVar("T")


class Part(msgspec.Struct, array_like=True, frozen=True):
    """So many tokens' KV, an object of this digest."""

    digest: bytes
    tokens: Size


class PlainAbout(msgspec.Struct, tag="kv", frozen=True):
    """KV as it is: tensors [tokens, width], a layer's keys and then its values, layer by layer."""

    layers: Size


class CodedAbout(msgspec.Struct, tag="coded", frozen=True):
    """Coded KV: of each layer keys' numbers and scales, then values'; then the beginning's KV, of
    as many layers, if it has one."""

    layers: Size
    codec: Literal["int8", "int4"]
    width: Size
    dtype: str
    has_beginning: bool


class KvAbout(msgspec.Struct, frozen=True):
    """How an object has a run's KV."""

    how: PlainAbout | CodedAbout


class RunRecord(msgspec.Struct, tag="run", frozen=True):
    """A run of tokens: a history, or a canonical sequence of this origin."""

    token_ids: list[int]
    origin: str
    parts: list[Part]
    is_coded: bool = False


class RowsRecord(msgspec.Struct, array_like=True, frozen=True):
    """A mirror's own rows; its record's tensors have their positions and, of a diff, sources."""

    parts: list[Part]
    is_diff: bool


class MirrorRecord(msgspec.Struct, tag="mirror", frozen=True):
    """A mirror. Tensors: `cached`, `sources`, and of each of `own` positions and perhaps sources,
    int64."""

    token_ids: list[int]
    rule: Rule
    exact: Size
    canonical: str
    origin: str
    history: RunRecord
    own: list[RowsRecord]


class Record(msgspec.Struct, frozen=True):
    """What is kept in a model's `space` under a name."""

    space: str
    kind: str
    name: str
    what: RunRecord | MirrorRecord


def contents(kv: KV | Coded) -> tuple[KvAbout, list[torch.Tensor]]:
    """KV as an object's contents."""
    if isinstance(kv, KV):
        return KvAbout(PlainAbout(len(kv.keys))), list(_by_layer(kv.keys, kv.values))
    planes = list(_by_layer(kv.keys, kv.values))
    how = CodedAbout(
        layers=len(kv.keys),
        codec="int4" if kv.codec is Codec.INT4 else "int8",
        width=planes[0].width,
        dtype=dtype_name(planes[0].dtype),
        has_beginning=bool(kv.beginning.keys),
    )
    tensors = [one for plane in planes for one in (plane.numbers, plane.scales)]
    return KvAbout(how), [*tensors, *_by_layer(kv.beginning.keys, kv.beginning.values)]


def kv_of(about: KvAbout, tensors: Sequence[torch.Tensor]) -> KV | Coded:
    """`contents`, undone. Raises StoreError."""
    how = about.how
    if isinstance(how, PlainAbout):
        if len(tensors) != 2 * how.layers:
            raise StoreError(f"{len(tensors)} tensors, expected two for each of {how.layers}")
        return _kv(tensors)
    coded = 4 * how.layers
    if len(tensors) != coded + (2 * how.layers if how.has_beginning else 0):
        raise StoreError(f"{len(tensors)} tensors do not make coded KV of {how.layers} layers")
    dtype = dtype_of(how.dtype)
    codec = Codec(how.codec)
    planes = [
        Plane.checked(numbers, scales, how.width, dtype, codec.bits)
        for numbers, scales in zip(tensors[0:coded:2], tensors[1:coded:2], strict=True)
    ]
    tokens = {len(plane.numbers) for plane in planes}
    if len(tokens) > 1:
        raise StoreError(f"planes of {sorted(tokens)} tokens, expected as many in each")
    made = Coded(codec, planes[0::2], planes[1::2], _kv(tensors[coded:]))
    if made.beginning.keys and made.beginning.shape != made.shape:
        raise StoreError(f"a beginning {made.beginning.shape} of coded KV {made.shape}")
    return made


def _kv(tensors: Sequence[torch.Tensor]) -> KV:
    kinds = {(tuple(one.shape), one.dtype) for one in tensors}
    if len(kinds) > 1 or any(one.ndim != 2 for one in tensors):
        raise StoreError(f"tensors of {len(kinds)} kinds, expected [tokens, width] of one")
    return KV(list(tensors[0::2]), list(tensors[1::2]))


def run_record(run: Run | CodedRun, parts: list[Part]) -> RunRecord:
    return RunRecord(run.token_ids, run.origin, parts, isinstance(run, CodedRun))


def mirror_record(
    mirror: Mirror, canonical: str, history: list[Part], own: Sequence[list[Part]]
) -> tuple[MirrorRecord, list[torch.Tensor]]:
    """A mirror's record and tensors; `canonical` is its canonical sequence's name."""
    tensors = [mirror.cached, mirror.sources]
    rows = []
    for one, parts in zip(mirror.own, own, strict=True):
        rows.append(RowsRecord(parts, one.sources is not None))
        tensors += [one.positions, *([] if one.sources is None else [one.sources])]
    record = MirrorRecord(
        token_ids=mirror.token_ids,
        rule=mirror.rule,
        exact=mirror.exact,
        canonical=canonical,
        origin=mirror.canonical.origin,
        history=run_record(mirror.history, history),
        own=rows,
    )
    return record, tensors


def run_of(record: RunRecord, kv: Sequence[KV | Coded]) -> Run | CodedRun:
    """A run of its parts' KV. Raises StoreError."""
    whole = _whole(kv, len(record.token_ids))
    if isinstance(whole, Coded):
        return CodedRun(record.token_ids, whole, record.origin)
    if record.is_coded:
        raise StoreError("KV as it is, expected coded KV")
    return Run(record.token_ids, whole, record.origin)


def mirror_of(
    record: MirrorRecord,
    tensors: Sequence[torch.Tensor],
    canonical: Run,
    history: Sequence[KV | Coded],
    own: Sequence[Sequence[KV | Coded]],
) -> Mirror:
    """A mirror into `canonical`. Raises StoreError where its parts do not make one."""
    left = list(tensors)
    wanted = 2 + sum(2 if one.is_diff else 1 for one in record.own)
    if len(left) != wanted:
        raise StoreError(f"{len(left)} tensors, expected {wanted}")
    cached, sources = (_places(left.pop(0)) for _ in range(2))
    rows = []
    for one, parts in zip(record.own, own, strict=True):
        positions = _places(left.pop(0))
        from_ = _places(left.pop(0)) if one.is_diff else None
        rows.append(Rows(positions, _whole(parts, len(positions)), from_))
    begins = run_of(record.history, history)
    made = Mirror(
        token_ids=record.token_ids,
        rule=record.rule,
        exact=record.exact,
        canonical=canonical,
        cached=cached,
        sources=sources,
        history=begins,
        history_tokens=len(begins.token_ids),
        own=tuple(rows),
    )
    _check(made)
    return made


def _check(mirror: Mirror) -> None:
    """Every token stands in it once, and what it refers to is there."""
    tokens = len(mirror.token_ids)
    parts = [torch.arange(mirror.history_tokens), mirror.cached]
    places = torch.cat([*parts, *(rows.positions for rows in mirror.own)])
    if not torch.equal(places.sort().values, torch.arange(tokens)):
        raise StoreError(f"a mirror's parts are not its {tokens} tokens, each of them once")
    if mirror.token_ids[: mirror.history_tokens] != mirror.history.token_ids:
        raise StoreError("a mirror's history has other tokens")
    sources = [mirror.sources, *(one.sources for one in mirror.own if one.sources is not None)]
    positions = [mirror.cached, *(one.positions for one in mirror.own if one.sources is not None)]
    here, there = torch.cat(positions), torch.cat(sources)
    if len(here) != len(there) or any(map(_descends, [one.positions for one in mirror.own])):
        raise StoreError("a mirror's positions do not ascend, or have no sources")
    if _descends(mirror.cached):
        raise StoreError("a mirror's positions do not ascend")
    if len(there) and int(there.max()) >= len(mirror.canonical.token_ids):
        raise StoreError("a mirror refers to more than its canonical sequence has")
    taken = torch.tensor(mirror.canonical.token_ids)[there]
    if not torch.equal(taken, torch.tensor(mirror.token_ids)[here]):
        raise StoreError("a mirror refers to other tokens than it has")


def _places(one: torch.Tensor) -> torch.Tensor:
    if one.dtype is not torch.int64 or one.ndim != 1 or (len(one) and int(one.min()) < 0):
        raise StoreError("positions, expected [tokens] int64, none below 0")
    return one


def _descends(places: torch.Tensor) -> bool:
    return bool((places.diff() <= 0).any())


def _whole(kv: Sequence[KV | Coded], tokens: int) -> KV | Coded:
    """All of it in one. Raises StoreError if it is not of so many tokens."""
    coded = [one for one in kv if isinstance(one, Coded)]
    if coded and len(kv) > 1:
        raise StoreError(f"{len(kv)} parts of coded KV, expected one")
    whole = coded[0] if coded else joined([one for one in kv if isinstance(one, KV)])
    if whole.tokens != tokens:
        raise StoreError(f"KV of {whole.tokens} tokens, expected {tokens}")
    return whole


def _by_layer(keys: Sequence[T], values: Sequence[T]) -> Iterator[T]:
    for pair in zip(keys, values, strict=True):
        yield from pair
