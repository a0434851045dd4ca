"""What is kept, once more where it outlives the process: written behind, found again by name.

All of what a name refers to is found, or nothing is. What cannot be read, or is not what was put
there, is said in the log, and computed anew.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from td_serve.errors import StoreError
from td_serve.segments import alike
from td_serve.store.codecs import Coded
from td_serve.store.families import CodedRun, History, Mirror, Run
from td_serve.store.kv import KV, Shape
from td_serve.store.objects import decode, digest_of, encode
from td_serve.store.records import (
    KvAbout,
    MirrorRecord,
    Part,
    Record,
    RunRecord,
    contents,
    kv_of,
    mirror_of,
    mirror_record,
    run_of,
    run_record,
)

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 * 2**20
"""A run is stored in pieces, so that no object is larger than other stores take."""


_SESSIONS = 1000
"""Of so many it is known what is stored; of others it is written once more."""


class Tier(Protocol):
    """Bytes by name, in a place that outlives the process."""

    def put(self, name: str, data: bytes) -> None:
        """Keep `data`, all of it or, whatever happens meanwhile, nothing."""
        ...

    def get(self, name: str) -> bytes | None: ...

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Job:
    """What is to be written under a name; `canonical` is that of a mirror's canonical sequence."""

    kind: str
    name: str
    what: History
    canonical: str


class Below:
    """The lower tier of one model's store; `space` is the model's, and nothing of another's is ever
    found. Called by one thread; another one writes."""

    def __init__(self, tier: Tier, space: str, shape: Shape) -> None:
        self._tier = tier
        self._space = space
        self._shape = shape
        self._parts: dict[int, tuple[weakref.ref[KV | Coded], list[Part]]] = {}
        """As what a KV is stored, by its identity."""
        self._canonicals: OrderedDict[str, RunRecord] = OrderedDict()
        """How far canonical sequences are stored, those of the last sessions."""
        self._spoilt: set[bytes] = set()
        """Objects that are there, and are not what they should be."""
        self._changed = threading.Condition()
        self._waiting: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._writing: tuple[str, str] | None = None
        self._is_closed = False
        self._writer = threading.Thread(target=self._write_all, name="td-store", daemon=True)
        self._writer.start()

    # ------------------------------------------------------------------ writing

    def save(self, kind: str, name: str, what: History, canonical: str = "") -> None:
        """Write this some time soon, unless something else follows under the same name."""
        with self._changed:
            if not self._is_closed:
                self._waiting[kind, name] = _Job(kind, name, what, canonical)
                self._changed.notify_all()

    def settle(self, kind: str, name: str) -> None:
        """Come back when nothing is waiting any more to be written under this name."""
        place = (kind, name)
        with self._changed:
            if place in self._waiting:
                self._waiting.move_to_end(place, last=False)
            self._changed.wait_for(lambda: place not in self._waiting and self._writing != place)

    def close(self, patience_s: float = 10.0) -> None:
        """Write what is waiting, for so long, and end. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._writer.join(patience_s)
        self._tier.close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                self._writing, job = self._waiting.popitem(last=False)
            try:
                self._write(job)
            except Exception as error:  # noqa: BLE001 - whoever waits for the writer would for ever
                log.warning("%s %s was not written: %r", job.kind, job.name, error)
            finally:
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        what, tensors = self._record(job)
        record = Record(self._space, job.kind, job.name, what)
        self._tier.put(self._named(job.kind, job.name), encode(record, tensors))
        if isinstance(what, RunRecord) and what.origin:
            self._note(job.name, what)

    def _note(self, name: str, canonical: RunRecord) -> None:
        with self._changed:
            self._canonicals[name] = canonical
            self._canonicals.move_to_end(name)
            if len(self._canonicals) > _SESSIONS:
                self._canonicals.popitem(last=False)

    def _record(self, job: _Job) -> tuple[RunRecord | MirrorRecord, list[torch.Tensor]]:
        what = job.what
        if isinstance(what, Mirror):
            history = self._stored(what.history.kv)
            own = [self._stored(rows.kv) for rows in what.own]
            return mirror_record(what, job.canonical, history, own)
        assert isinstance(what, Run | CodedRun), f"no record of a {type(what).__name__}"
        if isinstance(what, Run) and what.origin:
            return run_record(what, self._grown(job.name, what)), []
        return run_record(what, self._stored(what.kv)), []

    def _grown(self, name: str, run: Run) -> list[Part]:
        """A canonical sequence's parts: those that are stored, as far as they are the same, and
        what is new."""
        before = self._canonicals.get(name)
        parts: list[Part] = []
        done = 0
        if before is not None and before.origin == run.origin:
            common = alike(before.token_ids, run.token_ids)
            for part in before.parts:
                if done + part.tokens > common or not self._are_there([part]):
                    break
                parts.append(part)
                done += part.tokens
        return parts + self._pieces(run.kv.view(done))

    def _stored(self, kv: KV | Coded) -> list[Part]:
        """As what a KV is stored, after it has been if it was not."""
        found = self._parts.get(id(kv))
        if found is not None and found[0]() is kv and self._are_there(found[1]):
            return found[1]
        parts = self._pieces(kv) if isinstance(kv, KV) else [self._put(kv)]
        self._know(kv, parts)
        return parts

    def _know(self, kv: KV | Coded, parts: list[Part]) -> None:
        place = id(kv)
        self._parts[place] = (weakref.ref(kv, lambda _: self._parts.pop(place, None)), parts)

    def _pieces(self, kv: KV) -> list[Part]:
        most = max(1, _PIECE_BYTES * max(1, kv.tokens) // max(1, kv.bytes))
        return [self._put(kv.view(first, first + most)) for first in range(0, kv.tokens, most)]

    def _are_there(self, parts: Sequence[Part]) -> bool:
        """Whether they are, still: tiers lose what has not been used for long."""
        return all(
            part.digest not in self._spoilt and self._tier.has(part.digest.hex()) for part in parts
        )

    def _put(self, kv: KV | Coded) -> Part:
        data = encode(*contents(kv))
        part = Part(digest_of(data), kv.tokens)
        if not self._are_there([part]):
            self._tier.put(part.digest.hex(), data)
            self._spoilt.discard(part.digest)
        return part

    # ------------------------------------------------------------------ reading

    def load(
        self, kind: str, name: str, canonical: Callable[[str], Run | None]
    ) -> Run | CodedRun | Mirror | None:
        """What was kept under a name, whole; None if it is not there. `canonical` gives what is
        kept as a canonical sequence, by name."""
        try:
            return self._load(kind, name, canonical)
        except Exception as error:  # noqa: BLE001 - whatever stands there, it is only not taken over
            log.warning("%s %s was not read: %r", kind, name, error)
            return None

    def _load(
        self, kind: str, name: str, canonical: Callable[[str], Run | None]
    ) -> Run | CodedRun | Mirror | None:
        if (data := self._tier.get(self._named(kind, name))) is None:
            return None
        record, tensors = decode(data, Record)
        if (record.space, record.kind, record.name) != (self._space, kind, name):
            raise StoreError(f"it is {record.kind} {record.name} of {record.space}")
        what = record.what
        if isinstance(what, RunRecord):
            if (parts := self._read(what.parts)) is None:
                return None
            run = run_of(what, parts)
            self._know(run.kv, what.parts)
            if what.origin:
                self._note(name, what)
            return run
        base = canonical(what.canonical)
        if base is None or base.origin != what.origin:
            return None
        history = self._read(what.history.parts)
        own = [self._read(rows.parts) for rows in what.own]
        if history is None or None in own:
            return None
        mirror = mirror_of(what, tensors, base, history, [one for one in own if one is not None])
        self._know(mirror.history.kv, what.history.parts)
        for rows, stored in zip(mirror.own, what.own, strict=True):
            self._know(rows.kv, stored.parts)
        return mirror

    def _read(self, parts: Sequence[Part]) -> list[KV | Coded] | None:
        found = []
        for part in parts:
            if (data := self._tier.get(part.digest.hex())) is None:
                self._spoilt.add(part.digest)  # it may be there, but too short for the tier
                return None
            try:
                found.append(self._checked(data, part))
            except StoreError:
                self._spoilt.add(part.digest)
                raise
        return found

    def _checked(self, data: bytes, part: Part) -> KV | Coded:
        about, tensors = decode(data, KvAbout)
        if digest_of(data) != part.digest:
            raise StoreError("it is another object than its name says")
        kv = kv_of(about, tensors)
        if kv.tokens != part.tokens or (kv.tokens and kv.shape != self._shape):
            raise StoreError(f"KV {kv.tokens} {kv.shape}, expected {part.tokens} {self._shape}")
        return kv

    def _named(self, kind: str, name: str) -> str:
        parts = "\0".join([self._space, kind, name])
        return hashlib.blake2b(parts.encode(), digest_size=32).hexdigest()
