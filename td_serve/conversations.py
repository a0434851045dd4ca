"""Which conversation a request belongs to, and the key that stands for it inside. Pure.

A key is made of digests of tenant and conversation, so that no id that a client sends ever names
another tenant's KV, however it is spelt. The tenant's own part stands in front, so that tables can
be shared out among tenants.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping
from typing import Any

from td_serve import tenants
from td_serve.errors import BadRequest
from td_serve.types import AgentId, ConversationKey, SessionId

HEADERS = ("x-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id")
"""Request headers that name a conversation, the first one present counts."""

FIELDS = ("session_id", "conversation_id", "prompt_cache_key")
"""Fields of the body that do, after the headers."""

MOST_CHARACTERS = 512


def conversation_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The id by which a client names the conversation; None: it does not.

    Raises BadRequest when an id is no text, too long, or one that no URL could name.
    """
    named: list[tuple[str, Any]] = [
        (name, _as_sent(headers[name])) for name in HEADERS if name in headers
    ]
    named += [(name, body[name]) for name in FIELDS if body.get(name) is not None]
    for name, value in named:
        if not isinstance(value, str):
            raise BadRequest(f"{name}: {value!r}, expected a string", field=name)
        if not 0 < len(value) <= MOST_CHARACTERS:
            raise BadRequest(
                f"{name}: {len(value)} characters, expected 1 to {MOST_CHARACTERS}", field=name
            )
        if value in (".", "..") or any(unicodedata.category(one) == "Cc" for one in value):
            # It could be kept, but not deleted.
            raise BadRequest(
                f"{name}: {value!r}, expected no control characters, and not '.' or '..'",
                field=name,
            )
    return named[0][1] if named else None


def _as_sent(header: str) -> str:
    """A header's text: what clients send as UTF-8 is decoded as Latin-1 on the way (RFC 9110,
    5.5)."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return header


def key(tenant: str, conversation: str) -> ConversationKey:
    """The key of one tenant's conversation: 128 bits for each part, hexadecimal."""
    mine = hashlib.blake2b(tenant.encode(), digest_size=16)
    # Keyed: there is no text that two tenants' conversations could share.
    its = hashlib.blake2b(conversation.encode(), key=mine.digest(), digest_size=16)
    return ConversationKey(f"{mine.hexdigest()}-{its.hexdigest()}")


def writes(sim: SessionId, agent: AgentId) -> ConversationKey:
    """Under what an agent's turns in a session are kept for those who read what it puts out.

    Of the session's tenant; no id that a client can send gives the same.
    """
    return key(tenants.tenant_of(sim), f"\n{len(sim)}\n{sim}{agent}")


def tenant_of(conversation: ConversationKey) -> str:
    """The tenant's part of a key."""
    return conversation.partition("-")[0]
