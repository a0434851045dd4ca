"""What a model's prompts begin with."""

from __future__ import annotations

from typing import Any

from td_serve.segments import SEPARATOR

_NEUTRAL = (
    "You take part in something that several people or agents do together, in rounds. First comes "
    "what everybody said or did in the last round, then who you are and what you know, and at the "
    "end what to do now."
)
"""Nobody's own system text, after which what is shared is computed. It decides how close answers
come to exact ones: SmolLM2-135M, a village's round, two pages computed anew, gave .012 nats at the
first token with such a text, .019 with none, .025 with one short sentence."""


def neutral_head(tokenizer: Any) -> list[int]:
    """A chat's first tokens, its system text a neutral one; none without a template for one."""
    messages = [
        {"role": "system", "content": _NEUTRAL},
        {"role": "user", "content": SEPARATOR},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # noqa: BLE001 - templates raise what they like, and some know no system
        return []
    before, found, _ = str(text).partition(SEPARATOR)
    return list(tokenizer.encode(before, add_special_tokens=False)) if found else []
