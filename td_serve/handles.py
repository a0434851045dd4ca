"""Which tokens a handle stands for, and how many of them a prompt begins with. Pure.

Tokens are compared by a chain of digests, one for each whole block: each covers the block's tokens
and the digest before it, the first one also the salt, so that equal digests mean equal prefixes,
under the same salt. A chain says nothing about what follows it; the tokens after the last whole
block travel as they are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from td_serve.types import Handle, ReaderId

DIGEST_BYTES = 16
_TOKEN_BYTES = array("I").itemsize


class Keeper(Protocol):
    """Whoever keeps the blocks of handles, as a reader knows it. Order: `hold`, read, `let_go`."""

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        """Keep the blocks for at least `for_s` seconds from now, or until let go.

        False when they are not kept, or not any more. Raises Unavailable.
        """
        ...

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        """The reader is done, whichever way. Raises Unavailable."""
        ...


def chain(tokens: Sequence[int], block_size: int, salt: str | None) -> Iterator[bytes]:
    """The digests of `tokens`' whole blocks, DIGEST_BYTES each, in order."""
    before = hashlib.blake2b(
        b"" if salt is None else b"salt:" + salt.encode(), digest_size=DIGEST_BYTES
    ).digest()
    data = memoryview(array("I", tokens).tobytes())
    step = block_size * _TOKEN_BYTES
    for start in range(0, len(data) - step + 1, step):
        block = data[start : start + step]
        before = hashlib.blake2b(block, key=before, digest_size=DIGEST_BYTES).digest()
        yield before


def digests(tokens: Sequence[int], block_size: int, salt: str | None) -> bytes:
    """The whole chain, joined."""
    return b"".join(chain(tokens, block_size, salt))


def common_tokens(handle: Handle, prompt: Sequence[int], salt: str | None) -> int:
    """How many of the handle's tokens `prompt` begins with: whole blocks, and the handle's end."""
    blocks = 0
    for place, found in enumerate(chain(prompt, handle.block_size, salt)):
        start = place * DIGEST_BYTES
        if handle.digests[start : start + DIGEST_BYTES] != found:
            break
        blocks += 1
    common = blocks * handle.block_size
    if common == len(handle.digests) // DIGEST_BYTES * handle.block_size:
        for ours, theirs in zip(prompt[common:], handle.tail, strict=False):
            if ours != theirs:
                break
            common += 1
    return common


def shorten(handle: Handle, tokens: int) -> Handle:
    """The handle for its first `tokens` tokens only: no block beyond them is named any more.

    Raises ValueError when it does not stand for so many.
    """
    if not 0 < tokens <= handle.tokens:
        raise ValueError(f"tokens: {tokens}, expected 1 to {handle.tokens}")
    blocks = -(-tokens // handle.block_size)
    whole = tokens // handle.block_size
    reached_tail = whole == len(handle.digests) // DIGEST_BYTES
    return msgspec.structs.replace(
        handle,
        tokens=tokens,
        block_ids=[group[:blocks] for group in handle.block_ids],
        digests=handle.digests[: whole * DIGEST_BYTES],
        tail=handle.tail[: tokens - whole * handle.block_size] if reached_tail else [],
    )


def same(one: Handle, other: Handle) -> bool:
    """Whether both say the same of the same blocks; how long they last does not count."""
    return msgspec.structs.replace(one, remaining_s=other.remaining_s) == other
