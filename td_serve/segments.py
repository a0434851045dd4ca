"""Runs of tokens with an identity of their own. Pure.

A segment's key is 128 bits over its scope (model, adapter, tenant: whose KV must never meet) and
its tokens. A key only finds: whoever uses what it found compares the tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from td_serve.types import SegmentKey

SEPARATOR = "<TTSEP>"
"""Text that cuts a message or a prompt into segments. It is taken out of both."""

MOST_SEGMENTS = 4096
"""Of one prompt. Whoever plans a round walks through those of all members."""

KEY_BYTES = 16


def key(scope: Sequence[str], tokens: Sequence[int]) -> SegmentKey:
    """The key of `tokens` within `scope`."""
    found = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in scope:
        # Each with its length: no two scopes run together to the same text.
        encoded = part.encode()
        found.update(len(encoded).to_bytes(8, "big") + encoded)
    found.update(b"\xff" * 8 + array("I", tokens).tobytes())
    return SegmentKey(found.hexdigest())


def mark(parts: Sequence[str], glue: str = "") -> str:
    """The parts as one text, each a segment with the glue that follows it."""
    return SEPARATOR + (glue + SEPARATOR).join(parts) + SEPARATOR


def split(text: str, instead: str = "") -> list[str]:
    """A text's segments; those that are empty are none. `instead` takes each separator's place."""
    first, *others = text.split(SEPARATOR)
    return [part for part in (first, *(instead + other for other in others)) if part]


def locate(prompt: str, texts: Sequence[Sequence[str]]) -> list[int]:
    """Where to cut a rendered prompt, in characters: where each segment begins.

    What a template puts after a text belongs to that text's last segment: by itself it would be
    shared by all, and it is what attention holds on to. `texts` are what was put in, in order, each
    as its segments. A text that the template has changed, other than at its ends, is not cut.
    """
    found = _locate(prompt, texts, trimmed=False)
    if None in found:
        # A template that trims one text trims others, too: what has white space at its ends might
        # be found later, within another.
        found = _locate(prompt, texts, trimmed=True)
    places: set[int] = set()
    for parts, place in zip(texts, found, strict=True):
        if place is not None:
            # Where the segments' own edges are, as if nothing had been trimmed.
            edges = itertools.accumulate(map(len, parts[:-1]), initial=place.first)
            places.update(max(edge, place.start) for edge in edges if edge < place.end)
    return sorted(places)


class _Place(NamedTuple):
    """A text stands at [start, end); it would begin at `first` if nothing had been trimmed."""

    first: int
    start: int
    end: int


def _locate(prompt: str, texts: Sequence[Sequence[str]], trimmed: bool) -> list[_Place | None]:
    """Where each text stands, in order; `trimmed`, with or without the white space at its ends."""
    found: list[_Place | None] = []
    at = 0
    for parts in texts:
        text = "".join(parts)
        core = (text.strip() or text) if trimmed else text
        start = prompt.find(core, at) if core else -1
        if start < 0:
            found.append(None)
            continue
        first = start - text.find(core)
        if first >= at and prompt.startswith(text, first):
            start, core = first, text
        at = start + len(core)
        found.append(_Place(first, start, at))
    return found


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """With how many elements both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def tokenise(
    text: str, places: Sequence[int], encode: Callable[[str], Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The tokens of a text that is cut at `places`, and how many stand before each cut.

    Each segment is encoded by itself, so that it has the same tokens wherever it stands. Cuts at
    the ends of all tokens are none.
    """
    tokens: list[int] = []
    cuts = []
    for start, end in itertools.pairwise([0, *places, len(text)]):
        cuts.append(len(tokens))
        if end > start:
            tokens += encode(text[start:end])
    return tokens, sorted({cut for cut in cuts if 0 < cut < len(tokens)})
