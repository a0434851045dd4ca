"""A prefill engine's host, between two rounds: what the next one will share is computed already."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Sequence
from typing import Any

from td_serve.engine.passes import RoundPasses
from td_serve.foresight import foresee
from td_serve.types import Forecast


class Foreseeing:
    """Of one engine; `tokenizer` is its model's, or None where it has none."""

    def __init__(self, passes: RoundPasses, tokenizer: Any) -> None:
        self._passes = passes
        # Tokenizers must not be used by two threads; this one is no other's.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._turn = asyncio.Lock()

    async def prepare(self, forecast: Forecast) -> None:
        """Compute what is known by now of the next canonical sequence. Raises Unavailable."""
        if self._tokenizer is None:
            return
        async with self._turn:
            canonical = await asyncio.to_thread(
                functools.partial(
                    foresee,
                    forecast.last,
                    grows=forecast.grows,
                    said=forecast.said,
                    encode=self._encode,
                    decode=self._decode,
                )
            )
        if canonical is not None:
            await self._passes.prepare(canonical)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))
