"""Prompts as segments: separators taken out of what clients send, and tokens cut where they stood.

vLLM's OpenAI layer never sees a separator: lengths, limits and errors are those of the text without
any. Where a round's plan may want segments, the rendered prompt is encoded once more, segment by
segment, with a tokenizer and in a thread of this module's own.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from td_serve.errors import BadRequest
from td_serve.segments import MOST_SEGMENTS, SEPARATOR, locate, split, tokenise

log = logging.getLogger(__name__)


def take_out(body: Mapping[str, Any], instead: str = "") -> tuple[dict[str, Any], list[list[str]]]:
    """A request's body without separators, and the segments of each text that had some, in order.

    `instead` takes their place.

    Only `messages` and `prompt` have any. Raises BadRequest when there are too many.
    """
    texts: list[list[str]] = []
    try:
        plain = {
            name: _plain(value, texts, instead) if name in ("messages", "prompt") else value
            for name, value in body.items()
        }
    except RecursionError:
        raise BadRequest("messages: nested too deeply", field="messages") from None
    if (count := sum(map(len, texts))) > MOST_SEGMENTS:
        field = "messages" if "messages" in body else "prompt"
        raise BadRequest(
            f"{field}: {count} segments, expected at most {MOST_SEGMENTS}", field=field
        )
    return plain, texts


def _plain(value: Any, texts: list[list[str]], instead: str) -> Any:
    """A value without separators, at any depth. Mutates `texts`: adds the segments it had."""
    if isinstance(value, str):
        if SEPARATOR not in value:
            return value
        texts.append(split(value, instead))
        return "".join(texts[-1])
    if isinstance(value, Mapping):
        return {name: _plain(one, texts, instead) for name, one in value.items()}
    if isinstance(value, list):
        # Token ids have no separators, and there may be many.
        if value and isinstance(value[0], int):
            return value
        return [_plain(one, texts, instead) for one in value]
    return value


class Cutter:
    """Encodes prompts segment by segment. Close it."""

    def __init__(self, tokenizer: Any) -> None:
        # Tokenizers must not be used by two threads; this one is no other's.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "td-cutter")
        self._lead = list(self._tokenizer.encode(""))
        self._fits = self._tokenizer.decode([*self._encode("a"), *self._encode("b")]) == "ab"
        if not self._fits:
            log.warning(
                "prompts are not cut into segments: this tokenizer begins every text with a space"
            )

    async def cut(
        self, token_ids: Sequence[int], text: str, texts: Sequence[Sequence[str]]
    ) -> tuple[list[int], list[int]]:
        """The tokens of a rendered prompt, segment by segment, and where it is cut.

        `token_ids` are those of the whole; where this tokenizer cannot be cut, they stay.
        """
        if not self._fits:
            return list(token_ids), []
        tokens, cuts = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._tokenise, text, texts
        )
        lead = self._lead
        if list(token_ids[: len(lead)]) == lead != tokens[: len(lead)]:
            # The tokenizer itself puts something in front of a text.
            return [*lead, *tokens], [len(lead) + cut for cut in cuts]
        return tokens, cuts

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _tokenise(self, text: str, texts: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
        return tokenise(text, locate(text, texts), self._encode)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
