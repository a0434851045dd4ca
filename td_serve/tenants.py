"""Whose request it is, and the names that keep tenants apart. Pure.

A tenant is known by its API keys, of which the server has only SHA-256 digests. What tenants name
themselves, sessions of rounds and salts of prefix caches, gets the tenant's name inside, so that no
spelling of one tenant's reaches another's. (Conversations: `conversations.key`.) A server without
tenants is open: all its clients are `OPEN`, and what they name stays as they spell it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from td_serve.errors import Unauthorized
from td_serve.types import OPEN, SessionId, TenantId

_BEARER = re.compile(r"bearer +([a-z0-9._~+/-]+=*)", re.ASCII | re.IGNORECASE)
"""RFC 6750, section 2.1."""
_SCOPED = "~"
"""How session ids begin that say whose they are."""


class Tenants:
    """The tenants of a server, by the digests of their keys (`DeploymentConfig.tenants`)."""

    def __init__(self, keys: Mapping[str, Sequence[str]]) -> None:
        self._by_digest = {one: TenantId(name) for name, own in keys.items() for one in own}

    def of(self, authorization: str | None) -> TenantId:
        """Whose request has this `Authorization` header; None: it has none.

        Raises Unauthorized. The message never has what the client sent: it could be a key.
        """
        if not self._by_digest:
            return OPEN
        if authorization is None:
            raise _refusal("missing")
        if (match := _BEARER.fullmatch(authorization)) is None:
            raise _refusal("malformed")
        # No comparison in constant time: how long the look-up takes says something of digests at
        # most, and from a digest nobody finds a random key.
        tenant = self._by_digest.get(digest(match[1]))
        if tenant is None:
            raise _refusal("a key that is nobody's")
        return tenant


def _refusal(what: str) -> Unauthorized:
    return Unauthorized(
        f"authorization: {what}, expected 'Bearer' and a tenant's API key", field="authorization"
    )


def digest(key: str) -> str:
    """What a cluster file has of an API key: its SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def session(tenant: TenantId, sim: str) -> SessionId:
    """The session that a tenant calls `sim`: no other tenant's, whatever the two are called."""
    if tenant == OPEN and not sim.startswith(_SCOPED):
        return SessionId(sim)
    # The length in front says where the tenant's name ends, which may have any character in it.
    return SessionId(f"{_SCOPED}{len(tenant)}:{tenant}/{sim}")


def sim_of(session_id: SessionId) -> str:
    """What the session's clients call it."""
    if not session_id.startswith(_SCOPED):
        return session_id
    length, _, rest = session_id.removeprefix(_SCOPED).partition(":")
    return rest[int(length) + 1 :]


def tenant_of(session_id: SessionId) -> TenantId:
    """Whose session it is."""
    if not session_id.startswith(_SCOPED):
        return OPEN
    length, _, rest = session_id.removeprefix(_SCOPED).partition(":")
    return TenantId(rest[: int(length)])


def salt(tenant: TenantId, own: str | None) -> str | None:
    """The prefix-cache salt of a request for which its client named the salt `own`, if any.

    Equal for equal tenants and equal own salts only: what is cached for one tenant answers no
    other one sooner.
    """
    if tenant == OPEN:
        return own
    mine = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    text = b"" if own is None else b"salt:" + own.encode()
    return hashlib.blake2b(text, key=mine, digest_size=16).hexdigest()
