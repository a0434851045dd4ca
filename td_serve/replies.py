"""What an endpoint answers: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from td_serve.errors import RequestError


@dataclass(frozen=True)
class JsonReply:
    """One JSON object, whole."""

    status: int
    body: dict[str, Any]


@dataclass(frozen=True)
class StreamReply:
    """Server-sent events, each `data: …` and two line ends, closed by `data: [DONE]`."""

    events: AsyncGenerator[str, None]


Reply = JsonReply | StreamReply


def error_reply(error: RequestError) -> JsonReply:
    """An error of ours in OpenAI's shape."""
    return JsonReply(
        int(error.status),
        {
            "error": {
                "message": error.message,
                "type": error.status.phrase.title().replace(" ", "") + "Error",
                "param": error.field,
                "code": int(error.status),
            }
        },
    )
