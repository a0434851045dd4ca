"""Where a prompt repeats, word for word, what was said in earlier rounds. Pure.

Clients that lay their prompts out themselves put the last round's outputs in as text. The tokens of
such a text are those that were put out, but for some at its edges, where the tokenizer may have
merged them with what stands around.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHORTEST = 16
"""Tokens of a text that is looked for, without its edges: shorter ones are not worth a segment."""
EDGE = 2
"""Tokens at either end of a text that may have been merged with others."""
_KEY = 8
"""First tokens by which texts are looked up: enough that few others begin so."""
_JOINT = 32
"""At most so many tokens between two texts are the first one's: labels, and what a template puts
between messages. By themselves they would be shared, and they are what attention holds on to."""


class Quotes:
    """What was said: any number of texts, each as the tokens that were put out."""

    def __init__(self, said: Iterable[Sequence[int]]) -> None:
        texts = {tuple(text[EDGE : len(text) - EDGE]) for text in said}
        self._by_beginning: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for text in sorted((one for one in texts if len(one) >= SHORTEST), key=len, reverse=True):
            self._by_beginning.setdefault(text[:_KEY], []).append(text)

    def cuts(self, prompt: Sequence[int]) -> list[int]:
        """Where to cut a prompt, so that every text that stands in it begins a segment."""
        if not self._by_beginning:
            return []
        found: list[int] = []
        end = 0
        at = 0
        while at < len(prompt):
            length = self._length_at(prompt, at)
            if not length:
                at += 1
                continue
            if found and at - end > _JOINT:
                found.append(end)
            found.append(at)
            at = end = at + length
        return [*found, end] if found else []

    def _length_at(self, prompt: Sequence[int], at: int) -> int:
        """How many tokens of a prompt from `at` on are a text, the longest; 0 if none begins."""
        for text in self._by_beginning.get(tuple(prompt[at : at + _KEY]), ()):
            # Their ends first: what goes round in circles begins alike wherever one looks.
            if tuple(prompt[at + len(text) - _KEY : at + len(text)]) != text[-_KEY:]:
                continue
            if tuple(prompt[at : at + len(text)]) == text:
                return len(text)
        return 0
