"""Runs of tokens with an identity of their own. Pure.

A segment's key is 128 bits over its scope (model, adapter, tenant: whose KV must never meet) and
its tokens. A key only finds: whoever uses what it found compares the tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from td_serve.types import SegmentKey

SEPARATOR = "<TTSEP>"
"""Text that cuts a prompt into segments. The model never sees it."""

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


def tokenise(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tokens of a text without its separators, and where it was cut.

    Each segment is encoded by itself, so that it has the same tokens wherever it stands. Cuts are
    numbers of tokens before them, ascending, without those at the ends.
    """
    tokens: list[int] = []
    cuts: list[int] = []
    for part in text.split(SEPARATOR):
        if tokens:
            cuts.append(len(tokens))
        tokens += encode(part)
    inner = sorted({cut for cut in cuts if cut < len(tokens)})
    return tokens, inner
