"""Where a prompt repeats, word for word, what was said in earlier rounds. Pure.

Clients that lay their prompts out themselves put the last round's outputs in as text. The tokens of
such a text are those that were put out, but for some at its edges, where the tokenizer may have
merged them with what stands around.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHORTEST = 16
"""Tokens of a text that is looked for, without its edges: shorter ones are not worth a segment."""
_EDGE = 2
_KEY = 8
_JOINT = 32
"""At most so many tokens between two texts are the first one's: labels, and what a template puts
between messages. By themselves they would be shared, and they are what attention holds on to."""


def cuts(prompt: Sequence[int], said: Sequence[Sequence[int]]) -> list[int]:
    """Where to cut a prompt, so that every text of `said` that stands in it begins a segment.

    Of `said`, the tokens of each text as they were put out, any number in any order.
    """
    texts = _by_beginning(said)
    found: list[int] = []
    end = 0
    at = 0
    while at < len(prompt):
        length = _length_at(prompt, at, texts)
        if not length:
            at += 1
            continue
        if found and at - end > _JOINT:
            found.append(end)
        found.append(at)
        at = end = at + length
    return [*found, end] if found else []


def _by_beginning(said: Sequence[Sequence[int]]) -> Mapping[tuple[int, ...], list[list[int]]]:
    """The texts without their edges, by their first tokens, the longest first."""
    inner = [list(text[_EDGE : len(text) - _EDGE]) for text in said]
    texts: dict[tuple[int, ...], list[list[int]]] = {}
    for text in sorted((one for one in inner if len(one) >= SHORTEST), key=len, reverse=True):
        texts.setdefault(tuple(text[:_KEY]), []).append(text)
    return texts


def _length_at(
    prompt: Sequence[int], at: int, texts: Mapping[tuple[int, ...], Sequence[Sequence[int]]]
) -> int:
    """How many tokens of a prompt from `at` on are a text; 0 where none begins."""
    for text in texts.get(tuple(prompt[at : at + _KEY]), ()):
        if list(prompt[at : at + len(text)]) == text:
            return len(text)
    return 0
