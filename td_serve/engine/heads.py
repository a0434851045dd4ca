"""What a model's prompts begin with."""

from __future__ import annotations

from typing import Any

from td_serve.segments import SEPARATOR

_NEUTRAL = "You are one of several who take part."
"""Nobody's own system text: what is shared is computed after it."""


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
