"""What members of a round's successor will share, from what this round puts out. Pure.

Prompts tend to be laid out as they were: what each member reads of the others is what they said, in
the same order, with the same words around it. So the next canonical sequence is the last one with
new texts in place of the old, or after them where it grows from round to round. A wrong guess costs
its computation and nothing else: what is kept is compared by its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from td_serve.types import Canonical, Said, Span


def foresee(
    last: Canonical,
    *,
    grows: bool,
    said: Sequence[Said],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> Canonical | None:
    """The next canonical sequence, as far as it is known by now; None where nothing of it is.

    `last` is of the round whose texts now come; `grows` says that it had the one before within it.
    Each of `said` replaces one segment's text, in the order in which they stand there.
    """
    kept = last.segments if grows else []
    end = len(last.token_ids) if grows else _header(last)
    tokens = last.token_ids[:end]
    spans = [*kept]
    left = [one for one in said if one.before]
    if not left:
        return None
    known = len(left)
    for span in last.segments[-len(left) :] if grows else last.segments:
        old = last.token_ids[span.start : span.start + span.tokens]
        text = decode(old)
        found = _spoken(text, left)
        if found is None:
            new = [] if grows else list(old)  # nobody said it: it stands between
        elif found.now is None:
            break  # and what follows it cannot be computed either
        else:
            left.remove(found)
            new = list(encode(text.replace(found.before, found.now, 1))) if found.now else []
        if new:
            spans.append(Span(start=len(tokens), tokens=len(new)))
            tokens += new
    if len(left) == known or len(spans) == len(kept):
        return None
    return Canonical(key=last.key, token_ids=tokens, segments=spans)


def _spoken(text: str, said: Sequence[Said]) -> Said | None:
    """Whose words a segment has: the next in order, where that fits, or else the longest."""
    if said and said[0].before in text:
        return said[0]
    return max(
        (one for one in said if one.before in text), key=lambda one: len(one.before), default=None
    )


def _header(canonical: Canonical) -> int:
    """How many tokens stand before the first segment."""
    return canonical.segments[0].start if canonical.segments else len(canonical.token_ids)
